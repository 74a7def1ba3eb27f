"""A run on one HTML page."""
