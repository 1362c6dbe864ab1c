"""Samples that other ranks have: asked for and sent by all-to-all, on a thread of its own."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from datacache.pool.layout import Arrays, Layout
from datacache.pool.records import pack_samples, unpack_sample
from datacache.sources.source import SourceError

if TYPE_CHECKING:
    from datacache.from_tfposeidon import Wire

MOST_BYTES = 2**31 - 1
"""What Horovod can send to one rank at a time."""
IDLE_S = 0.05
"""How long a rank that needs nothing may keep others waiting."""


class SampleExchange:
    """Rounds in which all ranks take part: each says what it needs, and sends what others need.

    Ranks need not be at the same place: a rank that needs nothing takes part all the same, until all have closed.

    Args:
      wire: Of the job.
      name: The same on all ranks, another for each exchange.
      layout: Of the samples.
      answer: The samples of these numbers, `[n]` int64.
      complete: Whether this rank will need nothing any more; once all say so, rounds end.
    """

    def __init__(
        self,
        wire: Wire,
        name: str,
        layout: Layout,
        answer: Callable[[np.ndarray], list[Arrays]],
        complete: Callable[[], bool],
    ) -> None:
        self._wire, self._name, self._layout = wire, name, layout
        self._answer, self._complete = answer, complete
        self._asked: list[tuple[int, int, Future[Arrays]]] = []
        self._wake = threading.Condition()
        self._closing = self._over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"datacache {name}", daemon=True)
        self._thread.start()

    def ask(self, samples: Sequence[int], owners: Sequence[int]) -> list[Future[Arrays]]:
        """Asks ranks for samples, in the next round; no samples are coming if rounds are over.

        Raises:
          Exception: Whatever ended the rounds before all ranks had closed.
        """
        futures: list[Future[Arrays]] = [Future() for _ in samples]
        with self._wake:
            if self._error is not None:
                raise self._error
            if self._over:
                return []
            self._asked += zip(samples, owners, futures, strict=True)
            self._wake.notify()
        return futures

    def close(self) -> None:
        """Ends it once all ranks have closed.

        Raises:
          Exception: Whatever ended the rounds before.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        asked: list[tuple[int, int, Future[Arrays]]] = []
        try:
            while True:
                asked = self._next()
                state = self._gather([len(asked), self._closing, self._complete()], "state")
                if state[:, 0].any():
                    self._round(asked)
                elif (state[:, 1] | state[:, 2]).all():
                    break
        except BaseException as error:  # noqa: BLE001 - whoever waits for a sample raises it
            self._error = error
        with self._wake:
            self._over = True
            for _, _, future in [*asked, *self._asked]:
                if not future.done():
                    future.set_exception(
                        self._error or RuntimeError("All ranks had closed the cache.")
                    )

    def _next(self) -> list[tuple[int, int, Future[Arrays]]]:
        with self._wake:
            if not self._asked and not self._closing:
                self._wake.wait(IDLE_S)
            asked, self._asked = self._asked, []
            return sorted(asked, key=lambda one: one[1])

    def _round(self, asked: list[tuple[int, int, Future[Arrays]]]) -> None:
        size, rank = self._wire.topology.size, self._wire.topology.rank
        wanted = np.bincount([owner for _, owner, _ in asked], minlength=size)
        counts = self._gather(wanted, "counts")
        given = counts[:, rank]
        numbers = self._swap(
            np.array([sample for sample, _, _ in asked], np.int64), wanted, "numbers"
        )
        content, lengths = self._content(numbers, given)
        received = self._swap(lengths, given, "lengths")
        samples = self._swap(content, _by_rank(lengths, given), "samples")
        for (_, _, future), part in zip(asked, _parts(samples, received), strict=True):
            if isinstance(part, str):
                future.set_exception(SourceError(part))
            else:
                future.set_result(unpack_sample(part, self._layout))

    def _content(self, numbers: np.ndarray, given: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Samples as bytes, and their lengths; where they cannot be had the cause, and minus its length."""
        try:
            content, lengths = pack_samples(
                self._answer(numbers) if len(numbers) else [], self._layout
            )
            if max(_by_rank(lengths, given)) > MOST_BYTES:
                raise ValueError(
                    f"Samples for one rank must be at most {MOST_BYTES} bytes at a time. Use smaller batches."
                )
            return content, lengths
        except Exception as error:  # noqa: BLE001 - whoever asked raises it, and the round goes on
            text = f"{error} (on rank {self._wire.topology.rank})".encode()
            return np.frombuffer(text * len(numbers), np.uint8), np.full(len(numbers), -len(text))

    def _gather(self, values: Sequence[int] | np.ndarray, name: str) -> np.ndarray:
        return self._collective("gather", name, "int64")(np.array([values], np.int64)).numpy()

    def _swap(
        self, values: np.ndarray, splits: Sequence[int] | np.ndarray, name: str
    ) -> np.ndarray:
        return self._collective("swap", name, values.dtype.name)(
            values, np.array(splits, np.int32)
        ).numpy()

    @functools.cache  # noqa: B019 - as long as the thread runs
    def _collective(self, kind: str, name: str, dtype: str) -> Any:
        """One collective in a graph of its own: eager ones have no names, and others run beside these."""
        world, name = self._wire.topology.world, f"{self._name}.{name}"

        def gather(values: tf.Tensor) -> tf.Tensor:
            return self._wire.all_gather(values, world, name)

        def swap(values: tf.Tensor, splits: tf.Tensor) -> tf.Tensor:
            return self._wire.all_to_all(values, tf.unstack(splits, world.size), world, name)

        if kind == "gather":
            return tf.function(gather, [tf.TensorSpec([1, None], tf.int64)], autograph=False)
        return tf.function(
            swap, [tf.TensorSpec([None], dtype), tf.TensorSpec([None], tf.int32)], autograph=False
        )


def _by_rank(lengths: np.ndarray, given: np.ndarray) -> list[int]:
    """Bytes for each rank, of which each gets so many of the samples."""
    return [int(np.abs(part).sum()) for part in np.split(lengths, np.cumsum(given)[:-1])]


def _parts(content: np.ndarray, lengths: np.ndarray) -> Iterator[np.ndarray | str]:
    """The bytes of each sample, or why it cannot be had."""
    ends = np.cumsum(np.abs(lengths)).tolist()
    for (begin, end), length in zip(itertools.pairwise([0, *ends]), lengths.tolist(), strict=True):
        yield content[begin:end] if length >= 0 else content[begin:end].tobytes().decode()
