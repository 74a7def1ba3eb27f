"""Policies that act by the values of actions."""
