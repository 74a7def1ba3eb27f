"""`headrace autoscale`: sizes found by measurement."""
