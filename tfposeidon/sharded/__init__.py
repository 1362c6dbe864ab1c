"""Optimizer state on its owner: each rank updates a part of the variables, and all gather them."""
