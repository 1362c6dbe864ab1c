"""Opens or makes the pools of a cache, with what room there is."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from datacache.errors import NoRoomError
from datacache.levels.fingerprint import Traced
from datacache.levels.level import Level, Opener
from datacache.levels.levels import Levels
from datacache.levels.pool_level import PoolLevel, Verify
from datacache.levels.preprocessed_level import PreprocessedLevel
from datacache.levels.preprocessing import Preprocessing
from datacache.levels.source_level import SourceLevel
from datacache.pool.budget import budget_bytes
from datacache.pool.header import is_pool
from datacache.pool.idle import find_idle_pools, make_room
from datacache.pool.index import Index
from datacache.pool.layout import Arrays, Layout
from datacache.pool.pool import Pool
from datacache.pool.records import pack_samples
from datacache.pool.shard import SampleShard
from datacache.pool.spec import PoolSpec
from datacache.sources.source import IndexedSource, Source, digest
from datacache.statistics import Counts
from datacache.system.access import PRIVATE, Access
from datacache.system.room import free_bytes

log = logging.getLogger("datacache")
OF_A_DISK = "95%"
MORE_THAN_ANY = 2**62
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
    access: Access,
    verify: Verify,
    counts: Counts,
    shared_by: Callable[[Callable[[int, int], bool]], tuple[int, int]],
) -> Levels:
    """The levels of a cache; without room for a pool there is a log line, and one level less.

    Args:
      shared_by: Given what says whether all samples fit in memory here, on this of so many nodes: which of how many
        keeps its part; node 0 of 1 keeps all.

    Raises:
      CacheError: If a folder is no cache.
      SourceError: If there are no pools yet, and the first sample cannot be read.
    """
    on_local = _local_pool(source, disk, access)
    opener, last = Opener(), SourceLevel(source, counts)
    keep = functools.partial(PoolLevel, verify=verify, counts=counts, opener=opener)
    stored: Level = keep(on_local, last, hits="disk_hits") if on_local else last
    make = Preprocessing(source, traced, variable_shapes)

    @functools.cache
    def first() -> Arrays:
        return make([_first_stored(last, stored)], np.array([0]))[0]

    def layout() -> Layout:
        return on_disk.layout if on_disk else _layout(first(), traced, variable_shapes)

    def needed() -> int:
        return on_disk.size_bytes if on_disk else _bytes(first(), layout(), source)

    def plan(room: int, node: int = 0, nodes: int = 1) -> PoolSpec:
        return _plan(layout(), source, room, node, nodes)

    on_disk = in_memory = None
    if decoded is not None:
        on_disk = _disk_pool(Path(decoded) / fingerprint[:NAME], plan, access)
    if memory is not None:
        folder = Path(memory) / fingerprint[:NAME]
        in_memory = _memory_pool(folder, plan, needed, budget, shared_by, access)
        _get_ready(in_memory, verify)
    _keep_index(source, access, [on_local, in_memory, on_disk])
    cached = in_memory.layout if in_memory else layout()
    below: Level = PreprocessedLevel(stored, make, cached, source.name, opener)
    below = keep(on_disk, below, hits="decoded_hits") if on_disk else below
    levels = Levels(keep(in_memory, below) if in_memory else None, below, cached, counts, opener)
    if first.cache_info().currsize:
        levels.put(0, first())
    return levels


def _local_pool(source: Source, disk: Root, access: Access) -> Pool | None:
    return None if disk is None else _or_less(lambda: stored_pool(source, disk, access))


def _disk_pool(folder: Path, plan: Callable[[int], PoolSpec], access: Access) -> Pool | None:
    return _or_less(lambda: Pool(folder, lambda: plan(_of_a_disk(folder.parent)), access))


def _memory_pool(
    whole: Path,
    plan: Callable[[int, int, int], PoolSpec],
    needed: Callable[[], int],
    budget: int | str,
    shared_by: Callable[[Callable[[int, int], bool]], tuple[int, int]],
    access: Access,
) -> Pool | None:
    node, nodes = shared_by(lambda *part: _fits(whole, _part_of(whole, *part), needed, budget))
    folder = _part_of(whole, node, nodes)
    return _or_less(
        lambda: Pool(
            folder,
            lambda: plan(_in_memory(folder, needed() // nodes, budget), node, nodes),
            access,
        )
    )


def _get_ready(pool: Pool | None, verify: Verify) -> None:
    if pool is not None:
        pool.prepare(verify=verify == "first")


def _first_stored(last: SourceLevel, stored: Level) -> Arrays:
    if last.stream is not None:
        # Not from a pool above it, which would have to read the whole stream first.
        return next(last.stream({0}))[1]
    return stored.samples(np.array([0]))[0]


def stored_pool(source: Source, root: str | os.PathLike[str], access: Access = PRIVATE) -> Pool:
    """The pool of what is stored, which may differ in size in all its dimensions.

    Raises:
      CacheError: If the folder holds something else, or there is no room.
    """
    samples = [
        np.zeros([size or 0 for size in spec.shape], spec.dtype.as_numpy_dtype)
        for spec in source.signature
    ]
    layout = Layout.of(samples, [range(spec.shape.rank) for spec in source.signature])
    folder = Path(root) / f"stored-{digest(source.identity)[:NAME]}"
    return Pool(folder, lambda: _plan(layout, source, _of_a_disk(folder)), access)


def _of_a_disk(folder: Path) -> int:
    return budget_bytes(OF_A_DISK, free_bytes(folder))


def _with_idle(folder: Path, budget: int | str) -> int:
    """Bytes of a budget that memory has, or would have without pools that no process has open."""
    # With what a kill has left in the folder itself, which goes when the pool is made.
    return budget_bytes(
        budget, free_bytes(folder) + sum(one.bytes for one in find_idle_pools(folder.parent))
    )


def _in_memory(folder: Path, needed: int, budget: int | str) -> int:
    """Bytes of a budget that memory has; if that is less than needed, pools that no process has open are removed."""
    most = min(needed, budget_bytes(budget, MORE_THAN_ANY))

    def room() -> int:
        return budget_bytes(budget, free_bytes(folder))

    make_room(folder.parent, folder, room, most)
    return room()


def _fits(whole: Path, part: Path, needed: Callable[[], int], budget: int | str) -> bool:
    """Whether all samples do; pools are used as they were made, without a look at a sample."""
    if is_pool(whole) or is_pool(part):
        return is_pool(whole)
    return needed() <= _with_idle(whole, budget)


def _part_of(whole: Path, node: int, nodes: int) -> Path:
    return whole if nodes == 1 else whole.with_name(f"{whole.name}.{node}of{nodes}")


def _keep_index(source: Source, access: Access, pools: list[Pool | None]) -> None:
    """Beside the first of these pools that there is."""
    pool = next(filter(None, pools), None)
    if pool is not None and isinstance(source, IndexedSource):
        try:
            source.keep_index(Index(pool.folder, len(source), access))
        except NoRoomError as error:
            log.warning("datacache: each process looks for records by itself. %s", error)


def _bytes(first: Arrays, layout: Layout, source: Source) -> int:
    """Of all samples, if they are like the first."""
    return len(source) * (len(pack_samples([first], layout)[0]) + WORD)


def _plan(layout: Layout, source: Source, room: int, node: int = 0, nodes: int = 1) -> PoolSpec:
    of_one = layout.bytes + WORD
    slots = min(len(source), room // of_one)
    if slots == 0:
        raise NoRoomError(
            f"A pool needs room before it begins. Received: {room} bytes, for samples of {of_one}."
        )
    shard = SampleShard(samples=len(source), slots=slots, node=node, nodes=nodes)
    return PoolSpec(
        layout=layout,
        shard=shard,
        heap_bytes=room - shard.kept_samples * of_one,
        source=str(source),
    )


def _layout(sample: Arrays, traced: Traced, variable_shapes: bool) -> Layout:
    if not variable_shapes:
        return Layout.of(sample)
    return Layout.of(
        sample,
        [[axis for axis, size in enumerate(shape) if size is None] for shape in traced.shapes],
    )


def _or_less(open_pool: Callable[[], Pool]) -> Pool | None:
    try:
        return open_pool()
    except NoRoomError as error:
        log.warning("datacache: one level less. %s", error)
        return None
