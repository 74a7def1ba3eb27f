"""Environments of Gymnasium: stepped one by one in Python, or by a vector form of their own."""
