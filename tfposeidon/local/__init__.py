"""Combines weights that ranks have trained independently: the outer optimizers of `LocalUpdates`.

Each synchronization averages the pseudo-gradients of the ranks, which are the differences between
local and global weights. An outer optimizer updates the global weights with the average, and
determines the weights from which each rank continues.
"""

from tfposeidon.local.outer_optimizers import Average, Elastic, Outer, Rule, SlowMomentum

__all__ = ["Average", "Elastic", "Outer", "Rule", "SlowMomentum"]
