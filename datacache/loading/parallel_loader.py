"""Parallel loading: a separate process prepares the next batches during training."""

from __future__ import annotations

import itertools
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from datacache.from_tfposeidon import check_integer
from datacache.loading.loader_process import END_S, FAILED, Load, LoaderProcess, shared_arrays

REMEDIES = {
    1: "Its output shows the cause. The process imports `load` from its module, and the main "
    'script, which must start its work under `if __name__ == "__main__":`.',
    -signal.SIGKILL: "If no user killed the process, memory ran out: load smaller batches, or use "
    "fewer `buffers`.",
}
"""Remedies by exit code of the loader process."""


class LoaderError(RuntimeError):
    """Error of a batch that could not be loaded, or of a loader process that has ended."""


class ParallelLoader:
    """Process that loads batches ahead of training.

    The process calls `load` for the items of a pass in order, and writes each batch to one of a few
    buffers of shared memory, from which it is copied. With `views`, batches are not copied: a
    request for the next batch releases the previous one, whose buffer the loader then reuses. The
    process is spawned and imports `load`, so a training script must start its work under `if
    __name__ == "__main__":`. The process ends with the training process, even if that is killed,
    and its memory leaves no files in `/dev/shm`.

    A loader supports one thread at a time. Concurrent passes need one loader each.

    Args:
      load: `load(mode, item)` returns an array, or a list or tuple of arrays, of any shapes and of
        dtypes without objects. It must be picklable, should not use accelerators, and must not
        start processes with `multiprocessing`.
      buffers: Number of batches with a buffer, each as large as the largest batch. The loader is up
        to `buffers - 1` batches ahead.
      views: True for batches that are views of the buffers, which saves the copy. Each is valid
        until the next one is requested. `fit` and `tf.data` request batches ahead of training, so
        use views only in a loop that trains on a batch before it requests the next.

    Raises:
      ValueError: If there are fewer than two buffers.

    Cost: two copies of each batch, one with `views`; about 0.2 ms of messages per batch; at the
    start, the imports of `load`'s module and of the main script.

    Source: Ma, Mao and Taylor 2016, section 3.3, Algorithm 1. Differs: batches stay in host memory,
    where the paper's loader copies them to the GPU through a second buffer (steps 19 and 25); a
    spawned process and sockets replace MPI Spawn; filenames are sent `buffers` at a time; labels
    may be loaded as well.

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
            "One buffer holds the batch in training, and another the next batch. Call `load` "
            "directly to load without prefetching.",
        )
        self._load, self._views = load, views
        self._child: LoaderProcess | None = None
        self._turn = 0

    def start(self) -> None:
        """Starts the process if it does not run; `batches` calls this.

        Raises:
          TypeError: If `load` cannot be pickled.
        """
        if self._child is None or not self._child.alive:
            self.stop()
            self._child = LoaderProcess(self._load, self._buffers)

    def stop(self) -> None:
        """Ends the process and the current pass, if any; the last batch stays valid.

        It takes one second if `load` does not return.
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

        The pass starts with the request for its first batch, and ends any other pass.

        Args:
          mode: First argument of `load`, such as "train" or "validate".
          items: Second arguments of `load`, one for each batch, of any picklable type. At most
            `buffers` of them are taken ahead, so they may be infinite.

        Yields:
          Batches that `load(mode, item)` returns, which may be retained. With `views`, they are
          arrays in shared memory, valid until the next batch of this or another pass is requested.

        Raises:
          LoaderError: If `load` raised or cannot be imported, or the process ended. The pass is
            over; another one can start, with this process or a new one.
          RuntimeError: If another pass has started, or `stop` was called, since the last batch.
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
            # The next request is the handshake (steps 20 to 27): the buffer of the last batch is
            # free now.
            wanted = 1

    def _current_child(self, turn: int) -> LoaderProcess:
        if self._child is None or turn != self._turn:
            raise RuntimeError(
                "A batch must belong to the current pass. Received: a request for a batch of a "
                "pass that `stop` or another pass has ended. Call `batches` again, or use a second "
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
            remedy = REMEDIES.get(code, "Check its output for the cause.")
            raise LoaderError(
                f"The loader process must run until `stop`. Received: exit code {code}, before the "
                f"batch of {what}. {remedy} `batches` starts a new process."
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
            f"`load` must return a batch. Received: {reply.error} for {what}. Correct `load`, or "
            "omit the item. The loader continues with the next pass."
        )
        error.add_note(f"In the loader process:\n{reply.trace}")
        raise error


def _until_it_fails(items: Iterable[Any], failures: list[Exception]) -> Iterator[Any]:
    """Yields items; records an error, which is raised after the batches of all previous items."""
    try:
        yield from items
    except Exception as error:  # noqa: BLE001 - `batches` raises it
        failures.append(error)
