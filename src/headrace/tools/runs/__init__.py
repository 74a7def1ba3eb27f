"""Runs, many at a time: `headrace runs` and `headrace compare`."""
