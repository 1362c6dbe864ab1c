"""Runs a loader process, which receives requests as messages and returns batches in shared memory.

The training process uses `LoaderProcess`; the loader process runs `_serve`.
"""

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, reduction
from typing import Any

import numpy as np

from datacache.pool.spec import ALIGNMENT, aligned
from datacache.system.descriptors import Descriptor

GRACE_S = 1.0
"""Seconds that a loader has to finish its item after a request to stop."""
END_S = 60.0
"""Seconds that a loader has to exit after an error; TensorFlow may shut down slowly."""
FAILED = -1
"""Value of `turn` in the reply of a loader that cannot start."""
WATCH_S = 1.0
"""Interval in seconds at which the loader checks that its training process still runs."""

Load = Callable[[str, Any], Any]
ArraySpecs = list[tuple[np.dtype, tuple[int, ...]]]
"""Dtype and shape of each array of a batch."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Reply to a request of pass `turn`: a batch, or `error` and `trace` if `rebuild` is `None`."""

    turn: int
    specs: ArraySpecs = field(default_factory=list)
    rebuild: Callable[[list[np.ndarray]], Any] | None = None
    error: str = ""
    trace: str = ""


class SharedPages(Descriptor):
    """Memory without a name that two processes share; it is freed when the last of them ends."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self._mapping: mmap.mmap | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Pass the descriptor by multiprocessing, because the memory has no name to open it by.
        return _attach, (reduction.DupFd(self.fileno()),)

    def __del__(self) -> None:
        # A script may drop a loader without calling `stop`.
        self.close()

    def mapping(self, size: int) -> mmap.mmap:
        """Maps at least `size` bytes, growing the memory if needed; older mappings stay valid."""
        if self._mapping is None or len(self._mapping) < size:
            if os.fstat(self.fileno()).st_size < size:
                os.ftruncate(self.fileno(), size)
            self._mapping = mmap.mmap(self.fileno(), 0)
        return self._mapping


def _attach(descriptor: Any) -> SharedPages:
    return SharedPages(descriptor.detach())


def shared_arrays(pages: SharedPages, specs: ArraySpecs) -> list[np.ndarray]:
    """Returns the arrays of a batch as consecutive views of shared memory."""
    sizes = [aligned(dtype.itemsize * math.prod(shape)) for dtype, shape in specs]
    offsets = list(itertools.accumulate(sizes, initial=0))
    # mmap rejects empty mappings.
    buffer = pages.mapping(max(offsets[-1], ALIGNMENT))
    return [
        np.ndarray(shape, dtype, buffer, offset)
        for (dtype, shape), offset in zip(specs, offsets, strict=False)
    ]


class LoaderProcess:
    """Controls a loader process from the training process, and owns the memory of its buffers."""

    def __init__(self, load: Load, buffers: int) -> None:
        try:
            content = pickle.dumps(load)
        except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
            raise TypeError(
                f"`load` must be picklable. Received: {load!r:.200} ({error}). Use a function or "
                "an object of a class at the top level of a module."
            ) from error
        self.buffers = [
            SharedPages(os.memfd_create("datacache-parallel-loader")) for _ in range(buffers)
        ]
        # Spawn the process, because neither threads nor TensorFlow survive a fork.
        context = multiprocessing.get_context("spawn")
        self._connection, end = context.Pipe()
        # A daemon is terminated if the training process exits without `stop`.
        self._process = context.Process(
            target=_serve,
            args=(end, content, self.buffers),
            name="datacache parallel loader",
            daemon=True,
        )
        # Only the loader may hold this end open, so that the connection closes with the loader.
        with end:
            self._process.start()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def request(self, turn: int, buffer: int, mode: str, item: Any) -> None:
        try:
            # Pickle here, so that the loader can attribute an unpickling error to its batch.
            content = pickle.dumps((mode, item))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"Items must be picklable. Received: item={item!r:.200} ({error}). Pass a file "
                "name or a number instead."
            ) from error
        # Ignore a closed connection, because `reply` raises an error if the process has ended.
        with contextlib.suppress(OSError):
            self._connection.send((turn, buffer, content))

    def reply(self, turn: int) -> Reply:
        """Waits for the next reply of a pass; drops older replies.

        Raises `EOFError` if the process ends.
        """
        sentinel = self._process.sentinel
        while sentinel not in connection.wait([self._connection, sentinel]):
            reply: Reply = self._connection.recv()
            if reply.turn in (turn, FAILED):
                return reply
        raise EOFError

    def stop(self, grace_s: float = GRACE_S) -> int:
        """Ends the process; returns its exit code, negative for a signal."""
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(grace_s)
        self._process.kill()
        self._process.join()
        code = self._process.exitcode
        self._process.close()
        self._connection.close()
        return code or 0


def _receive(end: connection.Connection, requests: queue.SimpleQueue[Any], trainer: int) -> None:
    """Receives requests until `None`; ends the process when its training process has ended."""
    # Poll the parent, because a parent-death signal is sent as soon as the starting thread ends.
    request: Any = ()
    try:
        while request is not None:
            # Forked children keep the connection open after the training process has ended.
            while not end.poll(WATCH_S):
                if os.getppid() != trainer:
                    raise EOFError
            request = end.recv()
            if request is None:
                # Skip remaining requests, so that the loader ends after the current request.
                with contextlib.suppress(queue.Empty):
                    while requests.get_nowait():
                        pass
            requests.put(request)
    except (EOFError, OSError):
        os._exit(1)


def _serve(end: connection.Connection, pickled_load: bytes, buffers: Sequence[SharedPages]) -> None:
    # Ignore Ctrl-C, which reaches the whole process group: the training process handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(end, requests, os.getppid()), daemon=True).start()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        try:
            load = pickle.loads(pickled_load)
        except Exception as error:  # noqa: BLE001 - the training process raises it
            end.send(Reply(turn=FAILED, error=f"{type(error).__name__}: {error}"))
            return
        for turn, buffer, content in iter(requests.get, None):
            end.send(_answer(turn, load, buffers[buffer], content))


def _answer(turn: int, load: Load, pages: SharedPages, content: bytes) -> Reply:
    try:
        mode, item = pickle.loads(content)
        arrays, rebuild = _split_batch(load(mode, item))
        specs = [(array.dtype, array.shape) for array in arrays]
        for view, array in zip(shared_arrays(pages, specs), arrays, strict=True):
            view[...] = array
    except Exception as error:  # noqa: BLE001 - the training process raises it
        text = f"{type(error).__name__}: {error}"
        return Reply(turn=turn, error=text, trace=traceback.format_exc())
    return Reply(turn=turn, rebuild=rebuild, specs=specs)


def _split_batch(batch: Any) -> tuple[list[np.ndarray], Callable[[list[np.ndarray]], Any]]:
    """Returns the arrays of a batch, and a function that rebuilds the batch from such arrays."""
    several = isinstance(batch, (list, tuple))
    arrays = list(batch) if several else [batch]
    for array in arrays:
        if not isinstance(array, (np.ndarray, np.generic)) or array.dtype.hasobject:
            of = f" of {array.dtype}" if isinstance(array, np.ndarray) else ""
            raise TypeError(
                "A batch must be an array, or a list or tuple of arrays, without objects. "
                f"Received: {type(array).__name__}{of}. Return NumPy arrays."
            )
    # The function must be picklable, because the reply contains it.
    container = list if isinstance(batch, list) else tuple
    return list(map(np.asarray, arrays)), container if several else operator.itemgetter(0)
