"""Families of environments, what each needs, and the returns that are known."""
