"""Samples in files that all processes of a node map: written once, read by everybody."""
