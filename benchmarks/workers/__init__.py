"""Programs that run on the ranks of a benchmark: one for each kind of system measured."""
