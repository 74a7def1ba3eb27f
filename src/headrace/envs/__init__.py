"""Environments: made, stepped, brought back."""
