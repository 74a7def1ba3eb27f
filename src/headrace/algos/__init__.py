"""One module for each algorithm."""
