"""Collectors: they make the batches that the learner learns from."""
