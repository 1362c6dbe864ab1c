"""The process that loads in parallel: requests go there, batches come back in memory of both."""

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

from datacache.pool.layout import ALIGNMENT

GRACE_S = 1.0
"""For a loader that is told to stop to finish the item it is at."""
WATCH_S = 1.0
"""How often a loader looks whether its training process is there."""

Load = Callable[[str, Any], Any]
Kinds = list[tuple[np.dtype, tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What became of a request: how to make the batch of views of its buffer, or what `load` raised."""

    turn: int
    rebuild: Callable[[list[np.ndarray]], Any] | None = None
    kinds: Kinds
    error: str = ""
    trace: str = ""


class SharedPages:
    """Pages of two processes without a name in any file system, so that they end with the last of the two."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._mapping: mmap.mmap | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (reduction.DupFd(self._descriptor),)

    def __del__(self) -> None:
        os.close(self._descriptor)

    def mapping(self, size: int) -> mmap.mmap:
        """At least so many bytes; arrays of an earlier, smaller mapping remain."""
        if self._mapping is None or len(self._mapping) < size:
            if os.fstat(self._descriptor).st_size < size:
                os.ftruncate(self._descriptor, size)
            self._mapping = mmap.mmap(self._descriptor, 0)
        return self._mapping


def _attach(descriptor: Any) -> SharedPages:
    return SharedPages(descriptor.detach())


def views(memory: SharedPages, kinds: Kinds) -> list[np.ndarray]:
    """Arrays of these types and shapes, one after another in the memory, which grows as it must."""
    sizes = [
        -(-dtype.itemsize * math.prod(shape) // ALIGNMENT) * ALIGNMENT for dtype, shape in kinds
    ]
    offsets = list(itertools.accumulate(sizes, initial=0))
    # Nothing at all cannot be mapped.
    buffer = memory.mapping(max(offsets[-1], ALIGNMENT))
    return [
        np.ndarray(shape, dtype, buffer, offset)
        for (dtype, shape), offset in zip(kinds, offsets, strict=False)
    ]


class LoaderProcess:
    """The loader process, as the training process has it."""

    def __init__(self, load: Load, buffers: int) -> None:
        self.memories = [
            SharedPages(os.memfd_create("datacache-parallel-loader")) for _ in range(buffers)
        ]
        context = multiprocessing.get_context("spawn")
        self._connection, end = context.Pipe()
        self._process = context.Process(
            target=_serve,
            args=(end, load, self.memories),
            name="datacache parallel loader",
            daemon=True,
        )
        try:
            self._process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self._connection.close()
            raise TypeError(
                f"`load` must be picklable. Received: {load!r:.200} ({error}). Use a function or an object of a class "
                "at the top level of a module."
            ) from error
        finally:
            end.close()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def ask(self, turn: int, place: int, mode: str, item: Any) -> None:
        """For a batch in that buffer."""
        try:
            content = pickle.dumps((mode, item))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"Items must be picklable. Received: item={item!r:.200} ({error}). Send a file's name or a number."
            ) from error
        # A process that has ended is an error where the batch is awaited.
        with contextlib.suppress(OSError):
            self._connection.send((turn, place, content))

    def reply(self, turn: int) -> Reply:
        """The next one of that pass; `EOFError` or `OSError` if the process has ended."""
        while True:
            if self._process.sentinel in connection.wait(
                [self._connection, self._process.sentinel]
            ):
                raise EOFError
            reply: Reply = self._connection.recv()
            if reply.turn == turn:
                return reply

    def stop(self) -> int:
        """Returns the exit code."""
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(GRACE_S)
        self._process.kill()
        self._process.join()
        code = self._process.exitcode
        self._process.close()
        self._connection.close()
        return code or 0


class Requests(threading.Thread):
    """What the training process asked for.

    Received on a thread of its own, so that the loader ends with the training process while `load` is busy, and so that
    the training process never waits to hand over a request. A death signal from the kernel would come when the thread
    that started the loader ends, and not only when its process does.
    """

    def __init__(self, end: connection.Connection) -> None:
        super().__init__(daemon=True)
        self._end = end
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._trainer = os.getppid()
        self._turn = 0

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
        # A fork of the training process that outlives it holds the other end open too.
        while not self._end.poll(WATCH_S):
            if os.getppid() != self._trainer:
                raise EOFError
        return self._end.recv()

    def __iter__(self) -> Iterator[tuple[int, int, bytes]]:
        for request in iter(self._queue.get, None):
            # Those of a pass that is over are not worth loading.
            if request[0] == self._turn:
                yield request


def _serve(end: connection.Connection, load: Load, memories: Sequence[SharedPages]) -> None:
    # Ctrl-C reaches the whole group, and the training process decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = Requests(end)
    requests.start()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for turn, place, content in requests:
            end.send(_answer(turn, load, memories[place], content))


def _answer(turn: int, load: Load, memory: SharedPages, content: bytes) -> Reply:
    try:
        mode, item = pickle.loads(content)
        arrays, rebuild = _parts(load(mode, item))
        kinds = [(array.dtype, array.shape) for array in arrays]
        for view, array in zip(views(memory, kinds), arrays, strict=True):
            view[...] = array
    except Exception as error:  # noqa: BLE001 - the training process raises it
        return Reply(
            turn=turn,
            kinds=[],
            error=f"{type(error).__name__}: {error}",
            trace=traceback.format_exc(),
        )
    return Reply(turn=turn, rebuild=rebuild, kinds=kinds)


def _parts(batch: Any) -> tuple[list[np.ndarray], Callable[[list[np.ndarray]], Any]]:
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
                f"A batch is an array, or a list or tuple of arrays, without objects. Received: {kind}."
            )
    rebuild: Any = (
        operator.itemgetter(0) if not several else list if isinstance(batch, list) else tuple
    )
    return [np.asarray(array) for array in arrays], rebuild
