"""Optimizers for large batches, LARS and LAMB, and learning rate schedules for them."""

from tfposeidon.optimizers import schedules
from tfposeidon.optimizers.lamb import LAMB
from tfposeidon.optimizers.lars import LARS

__all__ = ["LAMB", "LARS", "schedules"]
