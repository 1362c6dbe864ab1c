"""Rules by which weights that ranks have trained by themselves become one: see `LocalUpdates`."""

from tfposeidon.local.rules import Average, Elastic, Outer, Rule, SlowMomentum

__all__ = ["Average", "Elastic", "Outer", "Rule", "SlowMomentum"]
