"""Reads samples from their sources: folders, record files and datasets."""
