"""Ways in and out: models and settings of other libraries, policies that are shared."""
