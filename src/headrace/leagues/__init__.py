"""Leagues: learned policies against snapshots of themselves and other runs, and tournaments."""
