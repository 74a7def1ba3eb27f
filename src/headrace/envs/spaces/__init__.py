"""What an environment observes and takes: its spaces, action masks, and their description."""
