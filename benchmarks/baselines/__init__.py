"""Schemes that papers compare theirs with: no products, but schemes as a user would add them.

They stand in no registry of tfposeidon: benchmarks and tests pass objects of them as `scheme=`.
"""

from benchmarks.baselines.factor_server import FactorServer, balanced
from benchmarks.baselines.one_bit import OneBit

SYSTEMS = {"adam": FactorServer, "onebit": OneBit}
"""Makes a scheme with its defaults, by the name that results have for it."""

__all__ = ["SYSTEMS", "FactorServer", "OneBit", "balanced"]
