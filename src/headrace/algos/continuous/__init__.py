"""Algorithms for continuous actions that learn from replay."""
