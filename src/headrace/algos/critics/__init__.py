"""Algorithms whose policy learns from critics and a replay."""
