"""Clock and gradients of an emulated accelerator: work takes time, without using the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


class Stream:
    """Queue of work that an emulated accelerator executes in order.

    As on a real accelerator, the work of a step is queued ahead: a kernel starts when the previous
    one ended, even if the host noticed its end late. The load of the machine therefore does not
    increase the time of a step. Tests replace `clock` and `sleep`.

    >>> now_s = [0.0]
    >>> stream = Stream(clock=lambda: now_s[0], sleep=lambda s: now_s.append(now_s.pop() + s))
    >>> stream.begin()
    >>> stream.run(0.5)
    >>> stream.busy_s, now_s
    (0.5, [0.5])
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._free_s = clock()
        self.busy_s = 0.0
        """Seconds that the accelerator has worked so far."""

    def begin(self) -> None:
        """Starts a step: the accelerator is free now."""
        self._free_s = self._clock()

    def run(self, seconds: float) -> None:
        """Waits until a piece of work of this many seconds would be done."""
        # Work starts at the end of the previous work, not now: a late call sleeps less.
        self._free_s += seconds
        self.busy_s += seconds
        wait_s = self._free_s - self._clock()
        if wait_s > 0:
            self._sleep(wait_s)


SCALE = 1e-3
"""Scale of the values of a gradient."""


def gradient_values(length: int, generator: np.random.Generator) -> NDArray[np.float32]:
    """Returns `[length]` float32: normal values with log-normal scales."""
    values = generator.standard_normal(length, dtype=np.float32)
    values *= np.exp(generator.standard_normal(length, dtype=np.float32)) * SCALE
    return values
