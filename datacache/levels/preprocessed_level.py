"""The level between stored samples and cached ones: it holds nothing, and makes one of the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import numpy as np

from datacache.levels.level import Level, Opener, Stream
from datacache.pool.layout import Arrays, Layout


class PreprocessedLevel:
    """Pre-processed samples, made of those of the level below whenever they are asked for.

    Args:
      below: Has the stored samples, or streams them.
      preprocess: Makes cached samples of stored ones, given these and their indices.
      layout: What every cached sample must look like.
      name: Returns what a user would call the sample of an index, for messages.
      opener: Refuses to make samples in a forked child.
    """

    def __init__(
        self,
        below: Level,
        preprocess: Callable[[list[Arrays], np.ndarray], list[Arrays]],
        layout: Layout,
        name: Callable[[int], str],
        opener: Opener | None = None,
    ) -> None:
        self._below, self._preprocess, self._layout, self._name = below, preprocess, layout, name
        self._opener = opener or Opener()
        self.stream: Stream | None = None if below.stream is None else self._stream

    def samples(self, indices: np.ndarray) -> list[Arrays]:
        """See `Level.samples`."""
        self._opener.check(indices)
        return self._made(indices, self._below.samples(indices))

    def close(self) -> None:
        """See `Level.close`."""
        self._below.close()

    def _stream(self, indices: Collection[int]) -> Iterator[tuple[int, Arrays]]:
        assert self._below.stream is not None
        for sample, stored in self._below.stream(indices):
            yield sample, self._made(np.array([sample]), [stored])[0]

    def _made(self, indices: np.ndarray, stored: list[Arrays]) -> list[Arrays]:
        return [
            self._layout.check(arrays, self._name, sample)
            for arrays, sample in zip(
                self._preprocess(stored, indices), indices.tolist(), strict=True
            )
        ]
