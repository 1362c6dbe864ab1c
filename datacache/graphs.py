"""Detects datasets whose order changes between runs, and random ops that run before a cache."""

from __future__ import annotations

import logging
import os
from typing import Any

import tensorflow as tf

from datacache.from_tfposeidon import pipelines

log = logging.getLogger("datacache")
ONE_TO_ONE = {
    *("MapDataset", "ParallelMapDataset", "PrefetchDataset", "OptionsDataset", "ZipDataset"),
    *("AssertCardinalityDataset", "RangeDataset", "RestructuredDataset"),
}
"""Kinds of datasets that derive each element from the input elements at the same position."""
_IN_ORDER = ONE_TO_ONE | {
    *("TakeDataset", "SkipDataset", "ConcatenateDataset", "CacheDataset", "ShardDataset"),
    *("BatchDataset", "ParallelBatchDataset", "PaddedBatchDataset"),
}
"""Kinds of datasets whose order does not depend on the values of elements."""


def shuffling(dataset: tf.data.Dataset) -> str | None:
    """Returns why the order changes between runs, with a remedy, or `None` if it does not."""
    causes = [_shuffling_itself(one) for one in pipelines.datasets(dataset)]
    causes += [
        _unsteady_node(node)
        for graph in pipelines.function_graphs(dataset)
        for node in pipelines.nodes_of_graph(graph.as_graph_def())
    ]
    return next(filter(None, causes), None)


def _shuffling_itself(one: Any) -> str | None:
    kind = pipelines.kind_of(one)
    if hasattr(one, "_seed"):
        again = getattr(one, "_reshuffle_each_iteration", bool(getattr(one, "_rerandomize", 0)))
        if again or again is None or not (one._seed or one._seed2):
            return (
                "shuffle, list_files or random. Remove it, because the cache shuffles, or pass "
                "shuffle=False to list_files"
            )
    if getattr(one, "_deterministic", None) == "false":
        return f"{kind} with deterministic=False. Omit that argument"
    drawn = any(
        pipelines.drawing_ops(pipelines.op_names(graph)) for graph in pipelines.function_graphs(one)
    )
    if kind not in _IN_ORDER and drawn:
        return f"elements that {kind} selects at random. Use random ops after the cache"
    if kind in ("ParallelInterleaveDataset", "VariantDataset"):
        nodes = pipelines.nodes_of_graph(pipelines.serialized(one))
        return next(filter(None, map(_unsteady_node, nodes)), None)
    return None


def _unsteady_node(node: Any) -> str | None:
    if node.op.startswith(("Shuffle", "RandomDataset")):
        return f"{node.op} within a dataset. Remove it: the cache shuffles"
    if node.attr["deterministic"].s == b"false":
        return f"{node.op.rstrip('V0123456789')} with deterministic=False. Omit that argument"
    return None


def processors_of_order(dataset: tf.data.Dataset) -> int:
    """Returns the number of processors if TensorFlow derives the order from it, else 0."""
    # Datasets that read files store their interleaving dataset in `_impl`.
    found = [getattr(one, "_impl", one) for one in pipelines.datasets(dataset)]
    cycles = [int(getattr(one, "_cycle_length", 0)) for one in found]
    return len(os.sched_getaffinity(0)) if tf.data.AUTOTUNE in cycles else 0


def warn_of_draws(what: str, ops: set[str]) -> None:
    """Logs a warning if random ops run before the cache."""
    if ops:
        log.warning(
            "datacache: %s uses random ops (%s), whose results are computed once per sample and "
            "cached. Augment after the cache: cache.dataset(...).map(augment)",
            what,
            ", ".join(sorted(ops)),
        )
