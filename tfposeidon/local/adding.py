"""The optimizer of rounds, as plans see it."""

from __future__ import annotations

from typing import Any

import keras

from tfposeidon.optimizers.wrapping import settings


class Adding:
    """Optimizer that is linear in what it is given, as rules are in differences.

    Plans ask what the optimizer makes of means; in rounds that does not depend on the one inside.

    Args:
      optimizer: The `LocalUpdates` whose rounds they are.
    """

    gradient_accumulation_steps = None

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.inner_optimizer = keras.optimizers.SGD(1.0)

    @property
    def agreed_settings(self) -> dict[str, Any]:
        """Settings that have to be the same on all ranks, for JSON."""
        inner = settings(self._optimizer.inner_optimizer, "inner optimizer")
        return inner | self._optimizer.agreed_settings
