"""Exchanges samples between ranks, by all-to-all on a separate thread."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorflow as tf

from datacache.pool.spec import Arrays, Layout
from datacache.sources.source import SourceError

if TYPE_CHECKING:
    from datacache.from_tfposeidon import Wire

MOST_BYTES = 2**31 - 1
"""Largest number of bytes that Horovod can send from one rank in one call."""
Bytes = list[int]
"""Numbers of bytes to send to each rank, or to receive from each rank."""
IDLE_S = 0.05
"""Seconds that an idle rank waits for requests before it joins the collectives of other ranks."""


class _Request(NamedTuple):
    sample: int
    owner: int
    future: Future[Arrays]


class SampleExchange:
    """Requests samples from other ranks, and sends the samples that other ranks requested.

    The collectives run on a separate thread, so ranks need not be at the same step. A rank without
    requests takes part until all ranks have closed or need no more samples.

    Cost: per iteration, an all-gather of P + 1 numbers from each of P ranks. With requests, also an
      all-gather of one number, and three all-to-alls (8 bytes per index and length, the samples).
    """

    def __init__(
        self,
        wire: Wire,
        name: str,
        layout: Layout,
        answer: Callable[[np.ndarray], list[Arrays]],
        needs_nothing: Callable[[], bool],
    ) -> None:
        self._wire, self._name, self._layout = wire, name, layout
        self._answer, self._needs_nothing = answer, needs_nothing
        self._requests: list[_Request] = []
        self._wake = threading.Condition()
        self._closing = self._has_ended = False
        self._error: BaseException | None = None
        # Cache per instance, because a cache of the class would keep this exchange alive.
        self._function = functools.cache(self._make_function)
        self._thread = threading.Thread(target=self._run, name=f"datacache {name}", daemon=True)
        self._thread.start()

    def ask(self, samples: Sequence[int], owners: Sequence[int]) -> list[Future[Arrays]]:
        """Requests samples; returns a future for each, or `[]` if the exchange has ended."""
        pairs = zip(samples, owners, strict=True)
        requests = [_Request(sample, owner, Future()) for sample, owner in pairs]
        with self._wake:
            if self._error is not None:
                raise self._error
            if self._has_ended:
                return []
            self._requests += requests
            self._wake.notify()
        return [request.future for request in requests]

    def close(self) -> None:
        """Waits until all ranks have closed."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        requests: list[_Request] = []
        size = self._wire.topology.size
        try:
            while True:
                requests = self._next_requests()
                counts = np.bincount([request.owner for request in requests], minlength=size)
                may_end = self._closing or self._needs_nothing()
                state = self._gather([*counts, may_end], "state")
                # The gathered numbers are equal on all ranks, so all call the same collectives.
                if state[:, :size].any():
                    self._run_round(requests, counts, state[:, self._wire.topology.rank])
                elif state[:, size].all():
                    break
        except BaseException as error:  # noqa: BLE001 - the futures of all requests raise it
            self._error = error
        with self._wake:
            self._has_ended = True
            late = self._error or RuntimeError(
                "Samples must be requested before all ranks close the cache. Received: "
                "a request after that. Open the cache again."
            )
            for request in [*requests, *self._requests]:
                if not request.future.done():
                    request.future.set_exception(late)

    def _next_requests(self) -> list[_Request]:
        with self._wake:
            if not self._requests and not self._closing:
                self._wake.wait(IDLE_S)
            requests, self._requests = self._requests, []
        # All-to-all sends consecutive requests to the ranks in order.
        return sorted(requests, key=lambda request: request.owner)

    def _run_round(
        self, requests: list[_Request], asked_counts: np.ndarray, answered_counts: np.ndarray
    ) -> None:
        asked = np.array([request.sample for request in requests], np.int64)
        indices = self._swap(asked, asked_counts, "numbers")
        content, lengths = self._pack_answers(indices)
        received_lengths = self._swap(lengths, answered_counts, "lengths")
        sent = _bytes_by_rank(lengths, answered_counts)
        received = self._swap_bytes(content, sent, _bytes_by_rank(received_lengths, asked_counts))
        for request, record in zip(requests, _records(received, received_lengths), strict=True):
            if isinstance(record, str):
                request.future.set_exception(SourceError(record))
            else:
                request.future.set_result(self._layout.unpack(record))

    def _swap_bytes(self, content: np.ndarray, sent: Bytes, received: Bytes) -> np.ndarray:
        """Exchanges packed samples, in as many all-to-alls as the largest message requires."""
        size = self._wire.topology.size
        most = MOST_BYTES // size
        count = self._gather([-(-max(sent) // most)], "parts").max()
        if count <= 1:
            return self._swap(content, sent, "samples")
        parts: list[list[np.ndarray]] = []
        begins = np.cumsum([0, *sent[:-1]])
        for begin in range(0, count * most, most):
            lengths, coming = (np.clip(np.subtract(n, begin), 0, most) for n in (sent, received))
            ends = zip(begins + begin, lengths, strict=True)
            part = np.concatenate([content[first : first + length] for first, length in ends])
            part = self._swap(part, lengths, "samples")
            parts.append(np.split(part, np.cumsum(coming)[:-1]))
        return np.concatenate([part[rank] for rank in range(size) for part in parts])

    def _pack_answers(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns samples as bytes, and the length of each, negative for the text of an error."""
        try:
            texts = list(map(self._layout.pack, self._answer(indices) if len(indices) else []))
            return np.frombuffer(b"".join(texts), np.uint8), np.array([*map(len, texts)], np.int64)
        except Exception as error:  # noqa: BLE001 - the requesting rank raises it
            # Send the error's text in place of each sample, because the collectives must continue.
            text = f"{error} (on rank {self._wire.topology.rank})".encode()
            return np.frombuffer(text * len(indices), np.uint8), np.full(len(indices), -len(text))

    def _gather(self, values: Sequence[int] | np.ndarray, name: str) -> np.ndarray:
        return self._function(name, "int64", True)(np.array([values], np.int64)).numpy()

    def _swap(
        self, values: np.ndarray, splits: Sequence[int] | np.ndarray, name: str
    ) -> np.ndarray:
        function = self._function(name, values.dtype.name, False)
        return function(values, np.array(splits, np.int32)).numpy()

    def _make_function(self, name: str, dtype: str, gathers: bool) -> Any:
        # Build a graph, because eager collectives have no names. Names are necessary, because the
        # collectives of training run concurrently in a different order.
        world, name = self._wire.topology.world, f"{self._name}.{name}"

        def gather(values: tf.Tensor) -> tf.Tensor:
            return self._wire.all_gather(values, world, name)

        def swap(values: tf.Tensor, splits: tf.Tensor) -> tf.Tensor:
            return self._wire.all_to_all(values, tf.unstack(splits, world.size), world, name)

        if gathers:
            return tf.function(gather, [tf.TensorSpec([1, None], tf.int64)], autograph=False)
        return tf.function(
            swap, [tf.TensorSpec([None], dtype), tf.TensorSpec([None], tf.int32)], autograph=False
        )


def _bytes_by_rank(lengths: np.ndarray, counts: np.ndarray) -> list[int]:
    """Returns the number of bytes for each rank, from samples' lengths and counts per rank."""
    return [int(np.abs(part).sum()) for part in np.split(lengths, np.cumsum(counts)[:-1])]


def _records(content: np.ndarray, lengths: np.ndarray) -> Iterator[np.ndarray | str]:
    """Yields the bytes of each sample, or the text of its error."""
    ends = np.cumsum(np.abs(lengths)).tolist()
    for (begin, end), length in zip(itertools.pairwise([0, *ends]), lengths.tolist(), strict=True):
        yield content[begin:end] if length >= 0 else content[begin:end].tobytes().decode()
