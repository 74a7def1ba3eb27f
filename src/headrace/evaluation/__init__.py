"""Trained policies at play: loading, evaluating, filming."""
