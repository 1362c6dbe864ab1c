"""Random values distributed like gradients: most near zero, with heavy tails."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SCALE = 1e-3


def gradient_values(length: int, generator: np.random.Generator) -> NDArray[np.float32]:
    """Returns `[length]` float32: normal values with log-normal scales."""
    values = generator.standard_normal(length, dtype=np.float32)
    values *= np.exp(generator.standard_normal(length, dtype=np.float32)) * SCALE
    return values
