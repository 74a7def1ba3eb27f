"""Algorithms that learn the values of actions."""
