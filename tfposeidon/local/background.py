"""An exchange that runs beside steps, and is waited for at a step that all ranks know."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Background:
    """Runs a function in a thread, one call at a time.

    Args:
      function: Function without arguments, such as one that TensorFlow has traced. It lets go of
        Python's lock while it waits.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._thread: threading.Thread | None = None
        self._result: Any = None
        self._error: BaseException | None = None

    def start(self) -> None:
        """Begins a call."""
        # A daemon: a job that ends with an error does not wait for ranks that are gone.
        self._thread = threading.Thread(target=self._run, daemon=True, name="tfposeidon-round")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:  # noqa: BLE001 (it is raised where the result is asked for)
            self._error = error

    def result(self) -> Any:
        """Waits for the call that was begun, and returns its result.

        In a run that was resumed since then nothing was begun, so that the call is made now.

        Raises:
          Exception: What the function raised.
        """
        if self._thread is None:
            self.start()
        assert self._thread is not None
        self._thread.join()
        self._thread, result, error = None, self._result, self._error
        self._result = self._error = None
        if error is not None:
            raise error
        return result
