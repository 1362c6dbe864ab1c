"""Gradient values as they are in training: most near zero, with heavy tails."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SCALE = 1e-3


def gradient_values(length: int, generator: np.random.Generator) -> NDArray[np.float32]:
    """`[length]` float32, normal with a log-normal spread."""
    values = generator.standard_normal(length, dtype=np.float32)
    values *= np.exp(generator.standard_normal(length, dtype=np.float32)) * SCALE
    return values
