"""`headrace export`: a policy as one file that runs without Headrace."""
