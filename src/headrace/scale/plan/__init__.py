"""Which machines to rent."""
