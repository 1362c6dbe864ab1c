"""Analysis of a graph or a `tf.data.Dataset` by its ops."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

log = logging.getLogger("datacache")
PYTHON_OPS = {"PyFunc", "EagerPyFunc", "PyFuncStateless"}
"""Ops that call Python."""
ONE_TO_ONE = {
    *("MapDataset", "ParallelMapDataset", "PrefetchDataset", "OptionsDataset", "ZipDataset"),
    *("AssertCardinalityDataset", "RangeDataset", "RestructuredDataset"),
}
"""Kinds of datasets that derive each element from the element below at the same position."""
_IN_ORDER = ONE_TO_ONE | {
    *("TakeDataset", "SkipDataset", "ConcatenateDataset", "CacheDataset", "ShardDataset"),
    *("BatchDataset", "ParallelBatchDataset", "PaddedBatchDataset"),
}
"""Kinds of datasets whose order does not depend on the values of elements."""
_UNSTEADY = {"Timestamp", "NonDeterministicInts", "FractionalMaxPool", "FractionalAvgPool"}
"""Random ops that are not stateful, or have neither a seed nor a generator."""
_WRITES = "Assign.*VariableOp|Resource(Scatter|Apply|SparseApply|StridedSliceAssign|CountUpTo)"


def nodes(definition: Any) -> Iterator[Any]:
    """Yields the `NodeDef` of each op of a `GraphDef`, and of the functions that it calls."""
    yield from definition.node
    for function in definition.library.function:
        yield from function.node_def


def ops(graph: Any) -> set[str]:
    """Returns the names of the ops of a graph, and of the functions that it calls."""
    return {node.op for node in nodes(graph.as_graph_def())}


def drawing_ops(names: set[str]) -> set[str]:
    """Returns the ops whose results may differ between runs.

    They are stateful and have a seed or a generator, read a clock, or change a variable, as the
    generators of Keras's random layers do.
    """
    return set(filter(_draws, names))


def file_ops(names: set[str]) -> set[str]:
    """Returns the ops that read files by their names."""
    return {name for name in names if _inputs(name) & {"filename", "filenames", "pattern"}}


def datasets(data: Any) -> Iterator[tf.data.Dataset]:
    """Yields all inputs of a dataset, recursively, and the dataset itself last."""
    if isinstance(data, tf.data.Dataset):
        # TensorFlow has no public API for the inputs of a dataset.
        for below in data._inputs():
            yield from datasets(below)
        yield data


def functions(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields the graph of each function of a dataset and of its inputs."""
    for one in datasets(dataset):
        yield from (function.function.graph for function in one._functions())


def kind_of(dataset: Any) -> str:
    """Returns the name of a dataset's class without underscores."""
    return type(dataset).__name__.strip("_")


def shuffling(dataset: tf.data.Dataset) -> str | None:
    """Returns the cause of an order that changes between runs, with its remedy, or `None`."""
    causes = [cause for one in datasets(dataset) if (cause := _shuffling_itself(one))]
    causes += [
        cause
        for graph in functions(dataset)
        for node in nodes(graph.as_graph_def())
        if (cause := _unsteady_node(node))
    ]
    return causes[0] if causes else None


def _shuffling_itself(one: Any) -> str | None:
    kind = kind_of(one)
    if hasattr(one, "_seed"):
        again = getattr(one, "_reshuffle_each_iteration", bool(getattr(one, "_rerandomize", 0)))
        if again or again is None or not (one._seed or one._seed2):
            return (
                "shuffle, list_files or random. Remove it, because the cache shuffles, or pass "
                "shuffle=False to list_files"
            )
    if getattr(one, "_deterministic", None) == "false":
        return f"{kind} with deterministic=False. Omit that argument"
    if kind not in _IN_ORDER and any(drawing_ops(ops(graph)) for graph in functions(one)):
        return f"elements that {kind} selects at random. Use random ops after the cache"
    if kind in ("ParallelInterleaveDataset", "VariantDataset"):
        return next(filter(None, map(_unsteady_node, _serialized(one))), None)
    return None


def _unsteady_node(node: Any) -> str | None:
    if node.op.startswith(("Shuffle", "RandomDataset")):
        return f"{node.op} within a dataset. Remove it: the cache shuffles"
    if node.attr["deterministic"].s == b"false":
        return f"{node.op.rstrip('V0123456789')} with deterministic=False. Omit that argument"
    return None


def _serialized(one: tf.data.Dataset) -> Iterator[Any]:
    """Returns the nodes of a dataset's graph, which contains file names and little else."""
    content = tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(one), external_state_policy=1
    )
    return nodes(tf.compat.v1.GraphDef.FromString(content.numpy()))


def warn_of_draws(what: str, ops: set[str]) -> None:
    """Warns of random ops before the cache."""
    if ops:
        log.warning(
            "datacache: %s uses random ops (%s), whose results are computed once per sample and "
            "cached. Augment after the cache: cache.dataset(...).map(augment)",
            what,
            ", ".join(sorted(ops)),
        )


def _draws(name: str) -> bool:
    op = op_def_registry.get(name)
    if name in _UNSTEADY or op is None or not op.is_stateful:
        return name in _UNSTEADY
    # Datasets within a function are analyzed separately.
    if re.search(r"Dataset(V\d+)?$", name):
        return False
    attributes = {attribute.name for attribute in op.attr}
    has_seed = "seed" in attributes or bool(_inputs(name) & {"seed", "alg", "algorithm"})
    return has_seed or re.match(_WRITES, name) is not None


def _inputs(name: str) -> set[str]:
    op = op_def_registry.get(name)
    return set() if op is None else {argument.name for argument in op.input_arg}
