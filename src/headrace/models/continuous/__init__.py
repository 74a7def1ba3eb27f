"""Policies and critics for continuous actions."""
