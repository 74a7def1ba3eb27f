"""Where the time of a run goes, what limits it, what to change."""
