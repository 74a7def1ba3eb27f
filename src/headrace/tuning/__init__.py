"""`headrace tune` and `headrace sweep`: many runs that one command manages."""
