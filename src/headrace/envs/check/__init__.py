"""`headrace check-env`: what is wrong with an environment, before anything is trained on it."""
