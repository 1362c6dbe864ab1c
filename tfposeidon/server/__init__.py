"""Optimizer updates on parameter servers: the shard of each rank, and what needs whole gradients."""
