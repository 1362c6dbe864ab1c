"""Centres of a model whose ranks train weights of their own: when they are shown, and assigned."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tfposeidon.communication import agreement, runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.exchange import replicas


class Centres:
    """Shows and hides the centres of a model's optimizers, and finds out if they were assigned.

    A centre is what is equal on all ranks where each trains weights of its own, as `LocalUpdates`
    lets them: with other optimizers all of this does nothing. Weights that somebody assigns while
    centres are shown are where all ranks go on from. To find out, a checksum of what is shown is
    noted, and compared before ranks go on.

    Args:
      find: Function that returns the model's optimizers that communicate.
    """

    def __init__(self, find: Callable[[], list[Any]]) -> None:
        self._find = find
        # Checksum of what is shown, while somebody will look whether it was assigned.
        self._noted: str | None = None

    @property
    def exist(self) -> bool:
        """True if ranks train weights of their own."""
        return bool(self._optimizers)

    @property
    def _optimizers(self) -> list[Any]:
        return [optimizer for optimizer in self._find() if optimizer.has_centre]

    # ------------------------------------------------------------------ shown and hidden

    def show(self) -> list[Any]:
        """Puts centres into the variables, until the next train step.

        Returns:
          The optimizers whose centres were not there yet.
        """
        return [optimizer for optimizer in self._optimizers if optimizer.show_centre()]

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Puts centres into the variables, within this context."""
        hidden = self.show()
        try:
            yield
        finally:
            for optimizer in hidden:
                optimizer.hide_centre()

    def begin_step(self, optimizers: Iterable[Any]) -> None:
        """Puts into the variables what this rank goes on from, before the next train step.

        Args:
          optimizers: The model's optimizers that have centres.
        """
        if self._noted is not None:
            # A step outside of `fit`: in it, ranks without a batch would be missed here.
            self.go_on_from_assigned()
            self.stop_looking()
        for optimizer in optimizers:
            optimizer.hide_centre()

    # ------------------------------------------------------------------ assigned

    def note(self) -> None:
        """Notes what is shown, if nobody has, to tell later whether something else was assigned."""
        if self.exist and self._noted is None:
            self._noted = self._checksum()

    def _checksum(self) -> str:
        return replicas.checksum([v for one in self._optimizers for v in one._trainable_variables])

    def note_restored(self) -> None:
        """Notes what is shown: it was restored, as were the weights of each rank."""
        self.stop_looking()
        self.note()

    def stop_looking(self) -> None:
        """Makes ranks go on from their own weights, whatever is assigned from now on."""
        self._noted = None

    def go_on_from_assigned(self, are_equal: bool = True) -> None:
        """Shows centres, and makes ranks go on from them if they were assigned since `note`.

        All ranks call it together.

        Args:
          are_equal: False where a broadcast may follow: what is shown need not be equal yet.

        Raises:
          RuntimeError: On all ranks, if it should be equal and is not.
        """
        # One that was hidden has taken steps since then.
        stepped = self.show()
        if self._noted is None or stepped:
            self._noted = None
            return
        now = self._checksum()
        noted, self._noted = self._noted, now
        everybody = exchange_objects([noted != now, now], runtime.wire(), "tp.assigned")
        if are_equal:
            agreement.require_equal(
                [checksum for _, checksum in everybody],
                "All ranks must begin with the same weights",
                "Assign them on all ranks, or give fit keras_callbacks.BroadcastVariables().",
            )
        if any(is_other for is_other, _ in everybody):
            for optimizer in self._optimizers:
                optimizer.forget_own()

    def report_loaded(self) -> None:
        """Says so if ranks would not go on from weights that were just loaded."""
        # Otherwise somebody will look before they go on.
        if self._noted is None:
            for optimizer in self._optimizers:
                optimizer.report_loaded()
