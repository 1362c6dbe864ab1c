"""Provides the outer optimizers of `LocalUpdates`, which combine the weights of all ranks.

Each synchronization averages the pseudo-gradients of the ranks, which are the global weights minus
the local weights. An outer optimizer updates the global weights with the average, and determines
the weights from which each rank continues.
"""

from tfposeidon.local.outer_optimizers import Average, Elastic, Outer, Rule, SlowMomentum

__all__ = ["Average", "Elastic", "Outer", "Rule", "SlowMomentum"]
