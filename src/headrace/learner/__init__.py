"""The learner: from a batch to new weights."""
