"""What limits a run, and which change of its settings would help."""
