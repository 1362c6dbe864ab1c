"""Outer optimizers for `LocalUpdates`: they combine weights that ranks have trained independently.

Each synchronization passes the mean difference from the global weights to an outer optimizer, which
updates the global weights and determines where the ranks continue.
"""

from tfposeidon.local.outer_optimizers import Average, Elastic, Outer, Rule, SlowMomentum

__all__ = ["Average", "Elastic", "Outer", "Rule", "SlowMomentum"]
