"""A model of training in discrete events, and what it is made from."""
