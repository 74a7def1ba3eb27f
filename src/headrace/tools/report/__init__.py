"""`headrace report`: a run on one HTML page."""
