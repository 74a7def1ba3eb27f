"""What a run writes to disk: run directories, checkpoints, timelines."""
