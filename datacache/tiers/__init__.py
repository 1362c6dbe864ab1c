"""Serves the samples of a node from tiers: memory, disk, preprocessing and the source."""
