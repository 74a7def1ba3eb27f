"""A model of how fast a run would be with other numbers of workers, learners and environments."""
