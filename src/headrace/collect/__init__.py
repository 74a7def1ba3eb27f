"""Collectors: whoever steps the environments."""
