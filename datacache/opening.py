"""Opens or makes the pools of a cache, with what room there is."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from datacache.budget import budget_bytes
from datacache.filling import Arrays, Filling
from datacache.fingerprint import Traced
from datacache.folder import NoRoomError, free_bytes, is_pool
from datacache.layout import Layout
from datacache.levels import Levels
from datacache.part import Part
from datacache.pool import Plan, Pool
from datacache.preprocessing import Preprocessing
from datacache.records import packed
from datacache.sources.source import Source, digest
from datacache.stored import Stored

log = logging.getLogger("tfposeidon")
OF_A_DISK = "95%"
WORD = 8
"""Bytes that a pool has for a sample beside its columns."""
NAME = 20
"""Hexadecimal digits of a fingerprint that name a folder: 80 bits."""
Root = str | os.PathLike[str] | None


def open_levels(
    source: Source,
    traced: Traced,
    fingerprint: str,
    *,
    memory: Root,
    disk: Root,
    decoded: Root,
    budget: int | str,
    variable_shapes: bool,
    filling: Filling,
    shared_by: Callable[[Callable[[], bool]], tuple[int, int]],
) -> Levels:
    """The levels of a cache; without room for a pool there is a log line, and one level less.

    Args:
      shared_by: Given what says whether all samples fit in memory here: which of how many nodes keeps its part;
        node 0 of 1 keeps all.

    Raises:
      CacheError: If a folder is no cache.
      SourceError: If there are no pools yet, and the first sample cannot be read.
    """
    on_local = _or_less(lambda: stored_pool(source, disk)) if disk is not None else None
    stored = Stored(source, on_local, filling)

    make = Preprocessing(source, traced, variable_shapes)

    @functools.cache
    def first() -> Arrays:
        components = next(iter(stored.all())) if stored.streams else stored.samples(np.array([0]))[0]
        return make([components], np.array([0]))[0]

    def layout() -> Layout:
        return on_disk.layout if on_disk else _layout(first(), traced, variable_shapes)

    def pool(folder: Path, budget: int | str, node: int = 0, nodes: int = 1) -> Pool | None:
        room = free_bytes(folder)
        return _or_less(lambda: Pool(folder, lambda: _plan(layout(), source, budget_bytes(budget, room), node, nodes)))

    on_disk: Pool | None = None
    on_disk = pool(Path(decoded) / fingerprint[:NAME], OF_A_DISK) if decoded is not None else None
    in_memory = None
    if memory is not None:
        whole = Path(memory) / fingerprint[:NAME]

        def fits() -> bool:
            return is_pool(whole) or _bytes(first(), layout(), source) <= budget_bytes(budget, free_bytes(whole))

        node, nodes = shared_by(fits)
        folder = whole if nodes == 1 else whole.with_name(f"{whole.name}.{node}of{nodes}")
        in_memory = pool(folder, budget, node, nodes)
    levels = Levels(stored, make, in_memory.layout if in_memory else layout(), in_memory, on_disk, filling)
    if first.cache_info().currsize:
        levels.put(0, first())
    return levels


def stored_pool(source: Source, root: str | os.PathLike[str]) -> Pool:
    """The pool of what is stored, which may differ in size in all its dimensions.

    Raises:
      CacheError: If the folder holds something else, or there is no room.
    """
    samples = [np.zeros([size or 0 for size in spec.shape], spec.dtype.as_numpy_dtype) for spec in source.signature]
    layout = Layout.of(samples, [range(spec.shape.rank) for spec in source.signature])
    folder = Path(root) / f"stored-{digest(source.identity)[:NAME]}"
    return Pool(folder, lambda: _plan(layout, source, budget_bytes(OF_A_DISK, free_bytes(folder))))


def _bytes(first: Arrays, layout: Layout, source: Source) -> int:
    """Of all samples, if they are like the first."""
    return len(source) * (len(packed([first], layout)[0]) + WORD)


def _plan(layout: Layout, source: Source, room: int, node: int = 0, nodes: int = 1) -> Plan:
    of_one = layout.bytes + WORD
    slots = min(len(source), room // of_one)
    if slots == 0:
        raise NoRoomError(f"A pool needs room before it begins. Received: {room} bytes, for samples of {of_one}.")
    part = Part(samples=len(source), slots=slots, node=node, nodes=nodes)
    return Plan(layout=layout, part=part, heap_bytes=room - part.kept * of_one, source=str(source))


def _layout(sample: Arrays, traced: Traced, variable_shapes: bool) -> Layout:
    if not variable_shapes:
        return Layout.of(sample)
    return Layout.of(sample, [[axis for axis, size in enumerate(shape) if size is None] for shape in traced.shapes])


def _or_less(open_pool: Callable[[], Pool]) -> Pool | None:
    try:
        return open_pool()
    except NoRoomError as error:
        log.warning("datacache: one level less. %s", error)
        return None
