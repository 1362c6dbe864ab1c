"""Tier that stores nothing and computes cached samples from stored ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import numpy as np
from typing_extensions import override

from datacache.levels.level import Level, Opener, Stream
from datacache.pool.layout import Arrays, Layout


class PreprocessedLevel(Level):
    """Cached samples, computed on each request from the stored samples of the tier below."""

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

    @override
    def samples(self, indices: np.ndarray) -> list[Arrays]:
        self._opener.refuse_in_child(indices)
        return self._make(self._below.samples(indices), indices)

    @override
    def close(self) -> None:
        self._below.close()

    def _stream(self, indices: Collection[int]) -> Iterator[tuple[int, Arrays]]:
        assert self._below.stream is not None
        for sample, stored in self._below.stream(indices):
            (arrays,) = self._make([stored], np.array([sample]))
            yield sample, arrays

    def _make(self, stored: list[Arrays], indices: np.ndarray) -> list[Arrays]:
        made = zip(self._preprocess(stored, indices), indices.tolist(), strict=True)
        return [self._layout.check(arrays, self._name, sample) for arrays, sample in made]
