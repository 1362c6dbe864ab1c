"""Opens the tiers of a cache, with stores sized to the available space."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf

from datacache.errors import NoRoomError
from datacache.pool.folder import STORE
from datacache.pool.pool import Pool
from datacache.pool.spec import WORD_BYTES, Arrays, Layout, PoolSpec, SampleShard
from datacache.sources.source import Source, SourceError, digest
from datacache.statistics import Counts
from datacache.system.room import budget_bytes, free_bytes, means_full
from datacache.tiers.preprocessing import Preprocessing
from datacache.tiers.tier import (
    PreprocessingTier,
    SourceTier,
    StoreTier,
    Stream,
    Tier,
    Verify,
)

log = logging.getLogger("datacache")
DISK_BUDGET = "95%"
"""Share of a disk's free space that a new store may occupy."""
FOLDER_DIGITS = 20
"""Number of hexadecimal digits of the fingerprint in a folder's name; 20 digits are 80 bits."""
Root = str | os.PathLike[str] | None
ChooseShard = Callable[[Callable[[int, int], bool]], tuple[int, int]]


def open_tiers(
    source: Source,
    make: Preprocessing,
    fingerprint: str,
    *,
    memory: Root,
    disk: Root,
    decoded: Root,
    budget: int | str,
    verify: Verify,
    counts: Counts,
    choose_shard: ChooseShard,
) -> StoreTier:
    """Opens the tiers of a cache, and creates stores if there is space; returns the first tier."""
    with contextlib.ExitStack() as on_error:
        opened = functools.partial(_open_if_room, on_error, source)
        last = on_error.enter_context(SourceTier(source, counts))
        stored_name = f"stored-{digest(source.identity)[:FOLDER_DIGITS]}"
        on_disk = opened(disk, stored_name, lambda: _stored_layout(source), DISK_BUDGET)
        stored = StoreTier(on_disk, last, counts, verify, "disk_hits") if on_disk else last
        first = functools.cache(functools.partial(_first_sample, make, stored, last.stream))
        name = fingerprint[:FOLDER_DIGITS]
        in_decoded = opened(decoded, name, lambda: _layout(make, first()), DISK_BUDGET)

        def new_layout() -> Layout:
            return in_decoded.layout if in_decoded else _layout(make, first())

        whole = Path(memory or "").expanduser() / name

        def shard_name(node: int, nodes: int) -> str:
            return name if nodes == 1 else f"{name}.{node}of{nodes}"

        def fits(node: int, nodes: int) -> bool:
            # Use an existing store whatever its size, without reading a sample.
            part = whole.with_name(shard_name(node, nodes))
            if (whole / STORE).exists() or (part / STORE).exists():
                return (whole / STORE).exists()
            layout = new_layout()
            in_heap = len(layout.pack(first())) if layout.varies else 0
            needed_bytes = len(source) * (in_heap + layout.bytes + WORD_BYTES)
            return needed_bytes <= budget_bytes(budget, free_bytes(whole))

        part = choose_shard((lambda *_: True) if memory is None else fits)
        in_memory = opened(memory, shard_name(*part), new_layout, budget, *part)
        if in_memory:
            in_memory.prepare()
        _forget_interrupted(last, [pool for pool in (on_disk, in_decoded, in_memory) if pool])
        layout = in_memory.layout if in_memory else new_layout()
        preprocessed = PreprocessingTier(stored, make, layout, source.name)
        below = StoreTier(in_decoded, preprocessed, counts, verify, "decoded_hits")
        top = StoreTier(in_memory, below, counts, verify)
        if first.cache_info().currsize:
            top.put(0, first())
        on_error.pop_all()
        return top


def _open_if_room(
    on_error: contextlib.ExitStack,
    source: Source,
    root: Root,
    name: str,
    layout: Callable[[], Layout],
    share: int | str,
    *part: int,
) -> Pool | None:
    """Opens a store below a folder; logs a warning and returns `None` if there is no space."""
    if root is None:
        return None
    folder = Path(root).expanduser() / name
    try:
        return on_error.enter_context(
            Pool(folder, lambda: _pool_spec(layout(), source, folder, share, *part))
        )
    except (NoRoomError, OSError) as error:
        if isinstance(error, OSError) and not means_full(error):
            raise
        log.warning("datacache: the cache skips a tier. %s", error)
        return None


def _first_sample(make: Preprocessing, stored: Tier, stream: Stream | None) -> Arrays:
    """Returns the first sample, preprocessed."""
    # Bypass a store above a stream, because the store would read the whole stream first.
    if stream:
        _, components = next(stream({0}))
    else:
        (components,) = stored.samples(np.array([0]))
    return make([components], np.array([0]))[0]


def _layout(make: Preprocessing, first: Arrays) -> Layout:
    if not make.variable_shapes:
        return Layout.of(first)
    # If a component's number of dimensions is unknown in the graph, use that of the first sample.
    shapes = [
        [None] * np.ndim(array) if spec.shape.rank is None else list(spec.shape)
        for array, spec in zip(first, tf.nest.flatten(make.structure), strict=True)
    ]
    return Layout.of(first, [[i for i, size in enumerate(one) if size is None] for one in shapes])


def _stored_layout(source: Source) -> Layout:
    """Returns the layout of stored samples, whose sizes may differ in all dimensions."""
    if any(spec.shape.rank is None for spec in source.signature):
        raise SourceError(
            f"Samples on a disk must have a known number of dimensions. Received: {source} with "
            f"{source.signature}. Set it with dataset.map(lambda x: tf.ensure_shape(x, [None])), or"
            " omit `disk`."
        )
    samples = [
        np.zeros([size or 0 for size in spec.shape], spec.dtype.as_numpy_dtype)
        for spec in source.signature
    ]
    return Layout.of(samples, [range(spec.shape.rank) for spec in source.signature])


def _forget_interrupted(last: SourceTier, pools: list[Pool]) -> None:
    """Clears stores, lowest first, if filling the lowest from a stream was interrupted."""
    # Filling reads the stream from its start in any case, and the order may have changed.
    if last.stream and pools and pools[0].is_only_user and 0 < pools[0].filled < pools[0].slots:
        for pool in pools:
            pool.clear()


def _pool_spec(
    layout: Layout, source: Source, folder: Path, share: int | str, node: int = 0, nodes: int = 1
) -> PoolSpec:
    """Describes a store for as many samples as fit into a share of the free space of a folder."""
    room_bytes, sample_bytes = budget_bytes(share, free_bytes(folder)), layout.bytes + WORD_BYTES
    slots = min(len(source), room_bytes // sample_bytes)
    if slots == 0:
        raise NoRoomError(
            f"A store needs space for at least one sample. Received: {room_bytes} bytes, for "
            f"samples of {sample_bytes} bytes. Free space, or increase `budget`."
        )
    shard = SampleShard(samples=len(source), slots=slots, node=node, nodes=nodes)
    heap_bytes = room_bytes - shard.kept_samples * sample_bytes
    return PoolSpec(layout=layout, shard=shard, heap_bytes=heap_bytes, source=str(source))
