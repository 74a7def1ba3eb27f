"""Backends: they run workers as processes of this machine, or of the machines of a cluster."""
