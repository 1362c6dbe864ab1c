"""Stores samples in files that all processes of a node map: written once, and read by all."""
