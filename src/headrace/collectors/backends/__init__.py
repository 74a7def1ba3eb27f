"""Backends: they run workers as processes of this machine or as Ray actors."""
