"""Loader process: requests go there, and batches come back in memory that both processes map."""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import multiprocessing
import operator
import os
import pickle
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, reduction
from typing import Any

import numpy as np
from typing_extensions import override

from datacache.pool.layout import ALIGNMENT

GRACE_S = 1.0
"""Seconds that a loader has to finish its item when it is told to stop."""
END_S = 60.0
"""Seconds that a loader has to end after an error of its own: TensorFlow's end may take some."""
FAILED = -1
"""Turn of a reply that says that the loader cannot begin."""
WATCH_S = 1.0
"""Seconds between two looks of a loader whether its training process is still there."""

Load = Callable[[str, Any], Any]
ArraySpecs = list[tuple[np.dtype, tuple[int, ...]]]
"""Type and shape of each array of a batch."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Outcome of a request.

    Attributes:
      turn: Index of the pass that the request belongs to.
      rebuild: Function that makes the batch of the arrays in its buffer; `None` if `load` raised.
      specs: Type and shape of each array in the buffer.
      error: Type and text of what `load` raised.
      trace: Traceback of what `load` raised.
    """

    turn: int
    rebuild: Callable[[list[np.ndarray]], Any] | None = None
    specs: ArraySpecs
    error: str = ""
    trace: str = ""


class SharedPages:
    """Memory of two processes, which ends with the last of them: no file system names it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._mapping: mmap.mmap | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Without a name, only its descriptor leads to the memory; multiprocessing hands it over.
        return _attach, (reduction.DupFd(self._descriptor),)

    def __del__(self) -> None:
        os.close(self._descriptor)

    def mapping(self, size: int) -> mmap.mmap:
        """Maps the memory, which grows as it must; arrays in an earlier mapping stay valid.

        Returns:
          The mapping, of at least that size.
        """
        if self._mapping is None or len(self._mapping) < size:
            if os.fstat(self._descriptor).st_size < size:
                os.ftruncate(self._descriptor, size)
            self._mapping = mmap.mmap(self._descriptor, 0)
        return self._mapping


def _attach(descriptor: Any) -> SharedPages:
    return SharedPages(descriptor.detach())


def shared_arrays(pages: SharedPages, specs: ArraySpecs) -> list[np.ndarray]:
    """Returns arrays that lie in shared memory, one behind the other."""
    sizes = [
        -(-dtype.itemsize * math.prod(shape) // ALIGNMENT) * ALIGNMENT for dtype, shape in specs
    ]
    offsets = list(itertools.accumulate(sizes, initial=0))
    # An empty mapping is an error.
    buffer = pages.mapping(max(offsets[-1], ALIGNMENT))
    return [
        np.ndarray(shape, dtype, buffer, offset)
        for (dtype, shape), offset in zip(specs, offsets, strict=False)
    ]


class LoaderProcess:
    """Loader process as the training process sees it.

    Attributes:
      buffers: Memory of each buffer.

    Raises:
      TypeError: If `load` cannot be pickled.
    """

    def __init__(self, load: Load, buffers: int) -> None:
        self.buffers = [
            SharedPages(os.memfd_create("datacache-parallel-loader")) for _ in range(buffers)
        ]
        # Spawned, as neither threads nor TensorFlow survive a fork.
        context = multiprocessing.get_context("spawn")
        self._connection, end = context.Pipe()
        # A daemon, which is ended where the training process ends without `stop`.
        self._process = context.Process(
            target=_serve,
            args=(end, _Unpickled(load), self.buffers),
            name="datacache parallel loader",
            daemon=True,
        )
        try:
            self._process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self._connection.close()
            raise TypeError(
                f"`load` must be picklable. Received: {load!r:.200} ({error}). Use a function or "
                "an object of a class at the top level of a module."
            ) from error
        finally:
            # Open in the loader only, so that the connection ends with it.
            end.close()

    @property
    def alive(self) -> bool:
        """True if the process runs."""
        return self._process.is_alive()

    def request(self, turn: int, buffer: int, mode: str, item: Any) -> None:
        """Requests a batch."""
        try:
            # Not by the connection: the loader unpickles it where an error is that of a batch.
            content = pickle.dumps((mode, item))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"Items must be picklable. Received: item={item!r:.200} ({error}). Send a file's "
                "name or a number."
            ) from error
        # A process that has ended is an error where the batch is awaited.
        with contextlib.suppress(OSError):
            self._connection.send((turn, buffer, content))

    def reply(self, turn: int) -> Reply:
        """Waits for the next reply of a pass; those of earlier passes are dropped.

        Returns:
          The reply: a batch, or the error that `load` raised.
        """
        while True:
            if self._process.sentinel in connection.wait(
                [self._connection, self._process.sentinel]
            ):
                raise EOFError
            reply: Reply = self._connection.recv()
            if reply.turn in (turn, FAILED):
                return reply

    def stop(self, grace_s: float = GRACE_S) -> int:
        """Ends the process.

        Returns:
          The exit code of the process; negative for a signal.
        """
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(grace_s)
        self._process.kill()
        self._process.join()
        code = self._process.exitcode
        self._process.close()
        self._connection.close()
        return code or 0


class _Unpickled:
    """Function to unpickle in the loader, where an error can be answered."""

    def __init__(self, load: Load) -> None:
        self._load = load

    def __getstate__(self) -> bytes:
        return bytes(reduction.ForkingPickler.dumps(self._load))

    def __setstate__(self, content: bytes) -> None:
        self._content = content

    def get(self) -> Load:
        return pickle.loads(self._content)


class Requests(threading.Thread):
    """Requests of the training process, in the loader process.

    They are received on a thread of its own, so that the loader ends with the training process
    while `load` is busy, and so that the training process never waits to hand over a request. A
    death signal from the kernel would come when the thread that started the loader ends, and not
    only when its process does.
    """

    def __init__(self, end: connection.Connection) -> None:
        super().__init__(daemon=True)
        self._end = end
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._trainer = os.getppid()
        self._turn = 0

    @override
    def run(self) -> None:
        try:
            while (request := self._receive()) is not None:
                self._turn = request[0]
                self._queue.put(request)
        except (EOFError, OSError):
            os._exit(1)
        self._turn = -1
        self._queue.put(None)

    def _receive(self) -> tuple[int, int, bytes] | None:
        # The end of the connection is not enough: a fork of the training process that outlives it
        # holds the other end open too.
        while not self._end.poll(WATCH_S):
            if os.getppid() != self._trainer:
                raise EOFError
        return self._end.recv()

    def __iter__(self) -> Iterator[tuple[int, int, bytes]]:
        for request in iter(self._queue.get, None):
            # Batches of a pass that is over are not worth loading.
            if request[0] == self._turn:
                yield request


def _serve(
    end: connection.Connection, unpickled: _Unpickled, buffers: Sequence[SharedPages]
) -> None:
    # Ctrl-C reaches the whole group, and the training process decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = Requests(end)
    requests.start()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        try:
            load = unpickled.get()
        except Exception as error:  # noqa: BLE001 - the training process raises it
            end.send(Reply(turn=FAILED, specs=[], error=f"{type(error).__name__}: {error}"))
            return
        for turn, buffer, content in requests:
            end.send(_answer(turn, load, buffers[buffer], content))


def _answer(turn: int, load: Load, pages: SharedPages, content: bytes) -> Reply:
    try:
        mode, item = pickle.loads(content)
        arrays, rebuild = _split_batch(load(mode, item))
        specs = [(array.dtype, array.shape) for array in arrays]
        for view, array in zip(shared_arrays(pages, specs), arrays, strict=True):
            view[...] = array
    except Exception as error:  # noqa: BLE001 - the training process raises it
        return Reply(
            turn=turn,
            specs=[],
            error=f"{type(error).__name__}: {error}",
            trace=traceback.format_exc(),
        )
    return Reply(turn=turn, rebuild=rebuild, specs=specs)


def _split_batch(batch: Any) -> tuple[list[np.ndarray], Callable[[list[np.ndarray]], Any]]:
    """Returns the arrays of a batch, and what makes the batch of such arrays again."""
    several = isinstance(batch, (list, tuple))
    arrays = list(batch) if several else [batch]
    for array in arrays:
        if not isinstance(array, (np.ndarray, np.generic)) or array.dtype.hasobject:
            kind = (
                f"an array of {array.dtype}"
                if isinstance(array, np.ndarray)
                else type(array).__name__
            )
            raise TypeError(
                "A batch is an array, or a list or tuple of arrays, without objects. Received: "
                f"{kind}."
            )
    # Picklable, as it is sent with the reply.
    rebuild: Any = (
        operator.itemgetter(0) if not several else list if isinstance(batch, list) else tuple
    )
    return [np.asarray(array) for array in arrays], rebuild
