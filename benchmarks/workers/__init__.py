"""Programs that run on the ranks of a benchmark: one per kind of system."""
