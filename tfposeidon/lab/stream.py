"""Clock and gradients of an emulated accelerator: work takes time, without using the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


class Stream:
    """Queue of work that an emulated accelerator carries out in order.

    As on a real accelerator, the work of a step is queued ahead: a kernel starts when the one
    before it ended, even if this machine noticed the end late. So the time of a step does not grow
    with the load of the machine.

    >>> now_s = [0.0]
    >>> stream = Stream(clock=lambda: now_s[0], sleep=lambda s: now_s.append(now_s.pop() + s))
    >>> stream.begin()
    >>> stream.run(0.5)
    >>> stream.busy_s, now_s
    (0.5, [0.5])

    Args:
      clock: Function that returns seconds, like `time.monotonic`; for tests.
      sleep: Function that waits for some seconds, like `time.sleep`; for tests.
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
        """Waits until a piece of work would be done.

        Args:
          seconds: Seconds that the accelerator works.
        """
        # Counted from the end of the work before, and not from now: a late call sleeps less.
        self._free_s += seconds
        self.busy_s += seconds
        wait_s = self._free_s - self._clock()
        if wait_s > 0:
            self._sleep(wait_s)


SCALE = 1e-3


def gradient_values(length: int, generator: np.random.Generator) -> NDArray[np.float32]:
    """Returns `[length]` float32: normal values, with a log-normal spread.

    Args:
      length: Number of values.
      generator: Source of the random numbers.
    """
    values = generator.standard_normal(length, dtype=np.float32)
    values *= np.exp(generator.standard_normal(length, dtype=np.float32)) * SCALE
    return values
