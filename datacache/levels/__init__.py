"""Levels at which a node looks for a sample: memory, a local disk, the source."""
