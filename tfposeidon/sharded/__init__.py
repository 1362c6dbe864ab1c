"""Shards optimizer state: each rank updates its part of the variables, and gathers the others."""
