"""Parallel loading: a process beside the training process prepares the next batches."""

from __future__ import annotations

import itertools
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from datacache.from_tfposeidon import check_integer
from datacache.loading.loader_process import END_S, FAILED, Load, LoaderProcess, shared_arrays

REMEDIES = {
    1: "What it printed says why; it imports the main script, which must begin its work under "
    '`if __name__ == "__main__":`, and `load` from its module.',
    -signal.SIGKILL: "Without anybody who killed it, memory was short: load smaller batches or "
    "give fewer `buffers`.",
}
"""Remedies for exit codes of the loader process."""


class LoaderError(RuntimeError):
    """A batch that could not be loaded, or a loader process that ended."""


class ParallelLoader:
    """Process that loads batches ahead of training.

    It runs `load` for the items of a pass in their order, and writes each batch to one of a few
    buffers of shared memory, from where it is copied. With `views` it is not: to ask for a batch is
    then to hand back the one before, in whose buffer the loader begins the next. The process is
    spawned: it imports `load`, so a script that trains must begin its work under
    `if __name__ == "__main__":`. It ends with the training process, even a killed one, and its
    memory has no name that could be left in `/dev/shm`.

    One thread at a time may use a loader; passes at the same time need a loader each.

    Args:
      load: `load(mode, item)` returns an array, or a list or tuple of arrays, of any shapes and of
        types without objects. It must be picklable, should leave accelerators alone, and must not
        start processes with `multiprocessing`.
      buffers: Number of batches that have memory, each as much as the largest batch. The loader is
        up to `buffers - 1` batches ahead.
      views: True for batches that are views of the buffers, which saves the copy. Each is valid
        until the next one is asked for, which `fit` and `tf.data` do ahead of training; only a loop
        that trains on a batch before it asks for another may take them.

    Raises:
      ValueError: If there are fewer than two buffers.

    Cost: two copies of each batch, one with `views`; about 0.2 ms of messages per batch; at the
      start, the imports of `load`'s module and of the main script.

    Source: Ma, Mao and Taylor 2016, section 3.3, Algorithm 1. Differs: batches stay in host memory,
      where the paper's loader puts them on the GPU through a second buffer there (steps 19 and 25);
      a spawned process and sockets take the place of MPI Spawn; filenames are sent `buffers` at a
      time; labels may be loaded too.

    Example:
      >>> import numpy as np
      >>> load = np.char.add  # Yours reads the file that `item` names, and prepares it for `mode`.
      >>> with ParallelLoader(load) as loader:
      ...     for batch in loader.batches("train on ", ["file 1", "file 2"]):
      ...         print(batch)
      train on file 1
      train on file 2
    """

    def __init__(self, load: Load, buffers: int = 2, views: bool = False) -> None:
        self._buffers = check_integer(
            "buffers",
            buffers,
            2,
            "One batch is trained on while another is loaded. Call `load` itself to load without "
            "reading ahead.",
        )
        self._load, self._views = load, views
        self._child: LoaderProcess | None = None
        self._turn = 0

    def start(self) -> None:
        """Starts the process, unless it runs; `batches` does so, too.

        Raises:
          TypeError: If `load` cannot be pickled.
        """
        if self._child is None or not self._child.alive:
            self.stop()
            self._child = LoaderProcess(self._load, self._buffers)

    def stop(self) -> None:
        """Ends the process and the pass, if any; the last batch stays valid.

        It takes a second if `load` does not return.
        """
        self._turn += 1
        child, self._child = self._child, None
        if child is not None:
            child.stop()

    def __enter__(self) -> ParallelLoader:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def batches(self, mode: str, items: Iterable[Any]) -> Iterator[Any]:
        """Yields the batches of a pass.

        The pass begins when the first batch is asked for, and ends any other pass.

        Args:
          mode: First argument of `load`, such as "train" or "validate".
          items: Second arguments of `load`, one for each batch; anything picklable. At most
            `buffers` of them are taken ahead, so there may be endlessly many.

        Yields:
          Batches that `load(mode, item)` returns, which may be kept; with `views` arrays in shared
          memory, valid until the next batch is asked for, of this pass or of another.

        Raises:
          LoaderError: If `load` raised or cannot be imported, or the process ended. The pass is
            over; another one can begin, with this process or a new one.
          RuntimeError: If another pass has begun, or `stop` was called, since the last batch.
          TypeError: If an item cannot be pickled.
        """
        self.start()
        self._turn += 1
        turn = self._turn
        failures: list[Exception] = []
        taken = _until_it_fails(items, failures)
        requests = zip(itertools.cycle(range(self._buffers)), taken, strict=False)
        requested: deque[tuple[int, Any]] = deque()
        wanted = self._buffers
        while True:
            for buffer, item in itertools.islice(requests, wanted):
                self._current_child(turn).request(turn, buffer, mode, item)
                requested.append((buffer, item))
            if not requested:
                if failures:
                    raise failures[0]
                return
            yield self._batch(turn, mode, *requested.popleft())
            # Asking again is the handshake (steps 20 to 27): now nobody needs the buffer of the
            # last batch.
            wanted = 1

    def _current_child(self, turn: int) -> LoaderProcess:
        if self._child is None or turn != self._turn:
            raise RuntimeError(
                "Batches must be those of the last pass. Received: a call for one of a pass that "
                "`stop` or another pass has ended. Call `batches` again, or use a second "
                "ParallelLoader."
            )
        return self._child

    def _batch(self, turn: int, mode: str, buffer: int, item: Any) -> Any:
        child = self._current_child(turn)
        what = f"mode={mode!r}, item={item!r:.200}"
        try:
            reply = child.reply(turn)
        except (EOFError, OSError):
            code, self._child = child.stop(END_S), None
            remedy = REMEDIES.get(code, "What it printed may say why.")
            raise LoaderError(
                f"The loader process must run until `stop`. Received: exit code {code}, before the "
                f"batch of {what}. {remedy} `batches` starts another."
            ) from None
        if reply.rebuild is not None:
            arrays = shared_arrays(child.buffers[buffer], reply.specs)
            return reply.rebuild(arrays if self._views else [array.copy() for array in arrays])
        if reply.turn == FAILED:
            self.stop()
            raise LoaderError(
                "`load` must be importable in another process. Received: "
                f"{reply.error}. Define it at the top level of a module, or of the main script "
                'before `if __name__ == "__main__":`.'
            )
        error = LoaderError(
            f"`load` must return a batch. Received: {reply.error} for {what}. Correct it, or leave "
            "the item out; the loader goes on with the next pass."
        )
        error.add_note(f"In the loader process:\n{reply.trace}")
        raise error


def _until_it_fails(items: Iterable[Any], failures: list[Exception]) -> Iterator[Any]:
    """Yields items; an error of theirs is due behind the batches of those before it."""
    try:
        yield from items
    except Exception as error:  # noqa: BLE001 - raised there
        failures.append(error)
