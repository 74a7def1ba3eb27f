"""Kernel environments: scalar Python functions, compiled for the CPU and for CUDA."""
