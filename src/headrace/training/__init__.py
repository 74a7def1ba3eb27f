"""One training run, from a request to its result."""
