"""Baselines of papers, implemented as custom schemes.

They have no names in tfposeidon: benchmarks and tests pass instances of them as `scheme=`.
"""

from benchmarks.baselines.factor_server import FactorServer, balanced
from benchmarks.baselines.one_bit import OneBit

SYSTEMS = {"adam": FactorServer, "onebit": OneBit}
"""Constructors of schemes with default options, by their names in results."""

__all__ = ["SYSTEMS", "FactorServer", "OneBit", "balanced"]
