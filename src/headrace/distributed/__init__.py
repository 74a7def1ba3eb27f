"""Ranks: which one this process is, how ranks are started, and how they exchange data."""
