"""Opens the tiers of a cache, with stores sized to the available space."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from datacache.errors import NoRoomError
from datacache.levels.fingerprint import TracedPreprocess
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
from datacache.sources.source import Source, SourceError, digest
from datacache.statistics import Counts
from datacache.system.access import PRIVATE, Access
from datacache.system.room import free_bytes, means_full

log = logging.getLogger("datacache")
DISK_BUDGET = "95%"
"""Share of a disk's free bytes that a new store may take."""
UNLIMITED = 2**62
"""More bytes than any machine has."""
WORD_BYTES = 8
"""Metadata bytes of each sample, in addition to its columns."""
FOLDER_DIGITS = 20
"""Hexadecimal digits of a fingerprint in a folder's name: 80 bits."""
Root = str | os.PathLike[str] | None
ChooseShard = Callable[[Callable[[int, int], bool]], tuple[int, int]]


def open_levels(
    source: Source,
    traced: TracedPreprocess,
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
    choose_shard: ChooseShard,
) -> Levels:
    """Opens the tiers of a cache, and creates missing stores.

    A store without enough space is left out with a warning.
    """
    stored_on_disk = _open_stored_pool(source, disk, access)
    opener, last = Opener(), SourceLevel(source, counts)
    keep = functools.partial(PoolLevel, verify=verify, counts=counts, opener=opener)
    stored: Level = keep(stored_on_disk, last, hits="disk_hits") if stored_on_disk else last
    make = Preprocessing(source, traced, variable_shapes)

    # The first sample determines sizes and types, and is read only if no store knows them.
    @functools.cache
    def first() -> Arrays:
        return make([_first_stored(last, stored)], np.array([0]))[0]

    def layout() -> Layout:
        return on_disk.layout if on_disk else _layout(first(), traced, variable_shapes)

    def needed_bytes() -> int:
        return on_disk.size_bytes if on_disk else _estimate_bytes(first(), layout(), source)

    def spec(room_bytes: int, node: int = 0, nodes: int = 1) -> PoolSpec:
        return _pool_spec(layout(), source, room_bytes, node, nodes)

    on_disk = in_memory = None
    if decoded is not None:
        on_disk = _open_decoded_pool(
            Path(decoded).expanduser() / fingerprint[:FOLDER_DIGITS], spec, access
        )
    if memory is not None:
        folder = Path(memory).expanduser() / fingerprint[:FOLDER_DIGITS]
        in_memory = _open_memory_pool(folder, spec, needed_bytes, budget, choose_shard, access)
        _prepare(in_memory, verify)
    _forget_interrupted(last, [stored_on_disk, on_disk, in_memory])
    _keep_index(source, access, [stored_on_disk, in_memory, on_disk])
    cached = in_memory.layout if in_memory else layout()
    below: Level = PreprocessedLevel(stored, make, cached, source.name, opener)
    below = keep(on_disk, below, hits="decoded_hits") if on_disk else below
    levels = Levels(keep(in_memory, below) if in_memory else None, below, cached, counts, opener)
    if first.cache_info().currsize:
        levels.put(0, first())
    return levels


def open_stored_pool(
    source: Source, root: str | os.PathLike[str], access: Access = PRIVATE
) -> Pool:
    """Opens or creates the store of stored samples, whose sizes may differ in all dimensions."""
    if any(spec.shape.rank is None for spec in source.signature):
        raise SourceError(
            "Samples on a disk must have a known rank. Received: "
            f"{source} with {source.signature}. Set the rank with dataset.map(lambda x: "
            "tf.ensure_shape(x, [None])), or omit `disk`."
        )
    samples = [
        np.zeros([size or 0 for size in spec.shape], spec.dtype.as_numpy_dtype)
        for spec in source.signature
    ]
    layout = Layout.of(samples, [range(spec.shape.rank) for spec in source.signature])
    folder = Path(root).expanduser() / f"stored-{digest(source.identity)[:FOLDER_DIGITS]}"
    return Pool(folder, lambda: _pool_spec(layout, source, _disk_room_bytes(folder)), access)


def _open_stored_pool(source: Source, disk: Root, access: Access) -> Pool | None:
    return None if disk is None else _open_if_room(lambda: open_stored_pool(source, disk, access))


def _open_decoded_pool(
    folder: Path, spec: Callable[[int], PoolSpec], access: Access
) -> Pool | None:
    return _open_if_room(
        lambda: Pool(folder, lambda: spec(_disk_room_bytes(folder.parent)), access)
    )


def _open_memory_pool(
    whole: Path,
    spec: Callable[[int, int, int], PoolSpec],
    needed_bytes: Callable[[], int],
    budget: int | str,
    choose_shard: ChooseShard,
    access: Access,
) -> Pool | None:
    """Opens the store in memory; `whole` is its folder if this node stores all samples."""

    def fits(node: int, nodes: int) -> bool:
        return _fits(whole, _shard_folder(whole, node, nodes), needed_bytes, budget)

    node, nodes = choose_shard(fits)
    folder = _shard_folder(whole, node, nodes)

    def new_spec() -> PoolSpec:
        return spec(_make_memory_room(folder, needed_bytes() // nodes, budget), node, nodes)

    return _open_if_room(lambda: Pool(folder, new_spec, access))


def _prepare(pool: Pool | None, verify: Verify) -> None:
    if pool is not None:
        pool.prepare(verify=verify == "first")


def _first_stored(last: SourceLevel, stored: Level) -> Arrays:
    if last.stream is not None:
        # Not from a store above it, which would read the whole stream first.
        return next(last.stream({0}))[1]
    return stored.samples(np.array([0]))[0]


def _disk_room_bytes(folder: Path) -> int:
    return budget_bytes(DISK_BUDGET, free_bytes(folder))


def reclaimable_bytes(folder: Path, budget: int | str) -> int:
    """Returns the bytes of a budget after the removal of all stores that no process has open."""
    # This counts remains of a killed process in the folder itself, which are removed on creation.
    idle_bytes = sum(pool.bytes for pool in find_idle_pools(folder.parent))
    return budget_bytes(budget, free_bytes(folder) + idle_bytes)


def _make_memory_room(folder: Path, needed_bytes: int, budget: int | str) -> int:
    """Returns the bytes of a budget; removes unused stores first if more are needed."""
    most = min(needed_bytes, budget_bytes(budget, UNLIMITED))

    def room() -> int:
        return budget_bytes(budget, free_bytes(folder))

    make_room(folder.parent, folder, room, most)
    return room()


def _fits(whole: Path, shard: Path, needed_bytes: Callable[[], int], budget: int | str) -> bool:
    """Returns whether all samples fit in memory on this node."""
    # Existing stores are used with their size, without reading a sample.
    if is_pool(whole) or is_pool(shard):
        return is_pool(whole)
    return needed_bytes() <= reclaimable_bytes(whole, budget)


def _shard_folder(whole: Path, node: int, nodes: int) -> Path:
    return whole if nodes == 1 else whole.with_name(f"{whole.name}.{node}of{nodes}")


def _forget_interrupted(last: SourceLevel, pools: list[Pool | None]) -> None:
    """Clears stores, lowest first, if filling the lowest from a stream was interrupted.

    The stream is read again from its start in any case, and its order may have changed.
    """
    lowest = next(filter(None, pools), None)
    if last.stream is None or lowest is None or not lowest.is_only_user:
        return
    if 0 < lowest.filled < lowest.slots:
        for pool in filter(None, pools):
            pool.clear()


def _keep_index(source: Source, access: Access, pools: list[Pool | None]) -> None:
    """Stores the index of a source's records next to the first existing store."""
    pool = next(filter(None, pools), None)
    if pool is not None and hasattr(source, "keep_index"):
        with _warned_without_room("each process searches the files for records"):
            source.keep_index(Index(pool.folder, len(source), access))


def _estimate_bytes(first: Arrays, layout: Layout, source: Source) -> int:
    """Returns the bytes of all samples if each is as large as the first."""
    return len(source) * (len(pack_samples([first], layout)[0]) + WORD_BYTES)


def _pool_spec(
    layout: Layout, source: Source, room_bytes: int, node: int = 0, nodes: int = 1
) -> PoolSpec:
    """Returns the description of a store for as many samples as fit into the bytes."""
    sample_bytes = layout.bytes + WORD_BYTES
    slots = min(len(source), room_bytes // sample_bytes)
    if slots == 0:
        raise NoRoomError(
            f"A store needs space for at least one sample. Received: {room_bytes} bytes, for "
            f"samples of {sample_bytes} bytes. Free space, or increase `budget`."
        )
    shard = SampleShard(samples=len(source), slots=slots, node=node, nodes=nodes)
    return PoolSpec(
        layout=layout,
        shard=shard,
        heap_bytes=room_bytes - shard.kept_samples * sample_bytes,
        source=str(source),
    )


def _layout(sample: Arrays, traced: TracedPreprocess, variable_shapes: bool) -> Layout:
    if not variable_shapes:
        return Layout.of(sample)
    # An unknown rank is replaced by that of the first sample.
    return Layout.of(
        sample,
        [
            range(np.ndim(array))
            if shape.rank is None
            else [axis for axis, size in enumerate(shape) if size is None]
            for array, shape in zip(sample, traced.shapes, strict=True)
        ],
    )


def _open_if_room(open_pool: Callable[[], Pool]) -> Pool | None:
    with _warned_without_room("the cache skips a tier"):
        return open_pool()
    return None


@contextlib.contextmanager
def _warned_without_room(consequence: str) -> Iterator[None]:
    """Logs a warning if the context runs out of space, and suppresses the error."""
    try:
        yield
    except (NoRoomError, OSError) as error:
        if isinstance(error, OSError) and not means_full(error):
            raise
        log.warning("datacache: %s. %s", consequence, error)
