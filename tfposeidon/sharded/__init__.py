"""Shards optimizer state: each rank updates a part of the variables, and all ranks gather them."""
