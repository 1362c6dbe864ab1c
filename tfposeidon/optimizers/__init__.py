"""Optimizers for large batches, LARS and LAMB, and learning rate schedules for them."""

from tfposeidon.optimizers import schedules
from tfposeidon.optimizers.large_batch import LAMB, LARS

__all__ = ["LAMB", "LARS", "schedules"]
