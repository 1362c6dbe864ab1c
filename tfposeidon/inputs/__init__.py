"""Shards training data: each sample is in the share of exactly one rank."""
