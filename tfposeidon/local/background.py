"""An exchange that runs beside steps, and is waited for at a step that all ranks know."""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

LONGEST_WAIT_S = 0.01
"""Seconds that a look takes at most: TensorFlow may have one thread for it and the exchange."""


class Background:
    """Runs a function in a thread, one call at a time.

    Args:
      function: Function without arguments, such as one that TensorFlow has traced. It lets go of
        Python's lock while it waits.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._number: int | None = None
        self._thread: threading.Thread | None = None
        self._result: Any = None
        self._error: BaseException | None = None
        # Before Horovod ends, which would take the exchange along.
        atexit.register(_end, weakref.ref(self))

    def start(self, number: Any) -> None:
        """Begins a call.

        Args:
          number: Number of the round that it is for.
        """
        self.discard()
        self._number = int(number)
        # A daemon: a job that ends with an error does not wait for ranks that are gone.
        self._thread = threading.Thread(target=self._run, daemon=True, name="tfposeidon-round")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:  # noqa: BLE001 (it is raised where the result is asked for)
            self._error = error

    def is_done(self, number: Any) -> bool:
        """Waits a moment, and returns whether the result of a round is there.

        In a run that was resumed since the call was begun, or that went back to an earlier
        snapshot, the call is made now.

        Args:
          number: Number of the round.
        """
        if self._number != int(number):
            self.start(number)
        assert self._thread is not None
        self._thread.join(LONGEST_WAIT_S)
        return not self._thread.is_alive()

    def result(self) -> Any:
        """Returns the result of the call, once `is_done`.

        Raises:
          Exception: What the function raised.
        """
        result, error = self._result, self._error
        self.discard()
        if error is not None:
            raise error
        return result

    def discard(self) -> None:
        """Waits for a call that was begun, and forgets it."""
        if self._thread is not None:
            self._thread.join()
        self._number = self._thread = self._result = self._error = None


def _end(reference: weakref.ref[Background]) -> None:
    # The others may be gone where a script has failed: Python notes what nobody caught.
    background = reference()
    if background is not None and not hasattr(sys, "last_value"):
        background.discard()
