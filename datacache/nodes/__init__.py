"""Shares a cache's samples between the nodes of a job."""
