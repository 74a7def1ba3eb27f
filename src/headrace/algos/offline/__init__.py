"""Algorithms that learn from recorded steps, and may go on beside an environment."""
