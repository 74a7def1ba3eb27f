"""Policies without values of their own, and the critics that they learn from."""
