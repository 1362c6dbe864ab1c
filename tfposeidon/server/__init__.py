"""Optimizer updates on servers: the shards of each rank, and what needs whole gradients."""
