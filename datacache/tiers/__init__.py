"""Tiers of a node's cache: memory, disk, preprocessing and the source."""
