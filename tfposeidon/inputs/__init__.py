"""Shares of training data: each sample on one rank."""
