"""`headrace plan`: the cheapest machines for a goal."""
