"""Optimizers for large batches, with a rate for each layer, and the schedules they go with."""

from tfposeidon.optimizers import schedules
from tfposeidon.optimizers.lamb import LAMB
from tfposeidon.optimizers.lars import LARS

__all__ = ["LAMB", "LARS", "schedules"]
