"""Optimizers for large batches, LARS and LAMB, and the learning rate schedules they go with."""

from tfposeidon.optimizers import schedules
from tfposeidon.optimizers.lamb import LAMB
from tfposeidon.optimizers.lars import LARS

__all__ = ["LAMB", "LARS", "schedules"]
