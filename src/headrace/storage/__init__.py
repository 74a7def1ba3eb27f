"""Files of a run: run directories, checkpoints, timelines."""
