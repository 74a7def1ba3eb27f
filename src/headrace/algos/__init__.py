"""One page per algorithm."""
