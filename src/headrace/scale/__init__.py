"""Finds what limits a run, how to divide a machine up, and which machines to rent."""
