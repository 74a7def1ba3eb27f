"""Numbers of envs, workers and learners, found by measurement."""
