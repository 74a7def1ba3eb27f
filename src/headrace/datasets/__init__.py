"""Recorded steps that are read from disk: of runs, and of Minari's data sets."""
