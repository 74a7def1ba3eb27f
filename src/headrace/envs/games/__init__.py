"""Games of several agents, stepped in Python: PettingZoo's, or one's own in its two forms."""
