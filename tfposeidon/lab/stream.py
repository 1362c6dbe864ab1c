"""An accelerator's clock: work of a given length, in order, that leaves the processor alone."""

from __future__ import annotations

import time
from collections.abc import Callable


class Stream:
    """Waits as long as an accelerator would work.

    As on a real one, a step's work is queued ahead: a piece starts when the one before it ended, even
    if this machine noticed that late. So the time of a step does not grow with the load of the machine.

    Args:
      clock, sleep: As in `time`; for tests.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._free_s = clock()
        self.busy_s = 0.0
        """Seconds of work so far."""

    def begin(self) -> None:
        """A step starts: what came before has ended."""
        self._free_s = self._clock()

    def run(self, seconds: float) -> None:
        """Returns when this piece of work would be done."""
        self._free_s += seconds
        self.busy_s += seconds
        wait_s = self._free_s - self._clock()
        if wait_s > 0:
            self._sleep(wait_s)
