"""From settings to a run that has ended."""
