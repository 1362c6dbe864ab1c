"""Sharing of the samples of a cache between the nodes of a job."""
