"""What can be told of a graph or a `tf.data.Dataset` by looking at its ops."""

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
_UNSTEADY = {"Timestamp", "NonDeterministicInts"}
"""Stateful ops that draw, although they have neither a seed nor a generator."""


def nodes(graph: Any) -> Iterator[Any]:
    """Yields the `NodeDef` of each op of a graph, and of the functions that it calls."""
    definition = graph.as_graph_def()
    yield from definition.node
    for function in definition.library.function:
        yield from function.node_def


def drawing_ops(graph: Any) -> set[str]:
    """Returns the ops of a graph whose results may be others each time.

    They are stateful and have a seed or a generator, read a clock, or change a variable, as the
    generators of Keras's random layers do.
    """
    return {name for name in {node.op for node in nodes(graph)} if _draws(name)}


def file_ops(graph: Any) -> set[str]:
    """Returns the ops of a graph that read files by their names."""
    return {
        name
        for name in {node.op for node in nodes(graph)}
        if _inputs(name) & {"filename", "filenames", "pattern"}
    }


def datasets(data: Any) -> Iterator[tf.data.Dataset]:
    """Yields all datasets that a dataset takes elements from, and the dataset itself last."""
    if isinstance(data, tf.data.Dataset):
        # TensorFlow has no public name for the datasets that one was made of.
        for below in data._inputs():
            yield from datasets(below)
        yield data


def functions(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields the graph of each function of a dataset and of those that it takes elements from."""
    for one in datasets(dataset):
        yield from (function.function.graph for function in one._functions())


def shuffling(dataset: tf.data.Dataset) -> str | None:
    """Returns what gives elements of a dataset in another order each time, and its remedy."""
    causes = [cause for one in datasets(dataset) if (cause := _shuffling_itself(one))]
    for node in (node for graph in functions(dataset) for node in nodes(graph)):
        if node.op.startswith("Shuffle") and node.attr["reshuffle_each_iteration"].b:
            causes.append("shuffle within a function. Leave it out: the cache shuffles")
        if node.attr["deterministic"].s == b"false":
            causes.append(f"{node.op} with deterministic=False. Leave that out")
    return causes[0] if causes else None


def _shuffling_itself(one: Any) -> str | None:
    kind = type(one).__name__.strip("_")
    if hasattr(one, "_seed"):
        again = getattr(one, "_reshuffle_each_iteration", getattr(one, "_rerandomize", False))
        if again or again is None or not (one._seed or one._seed2):
            return "shuffle, list_files or random. Leave it out: the cache shuffles"
    if getattr(one, "_deterministic", None) == "false" or (
        kind == "ParallelInterleaveDataset" and _is_interleaved_at_will(one)
    ):
        return f"{kind} with deterministic=False. Leave that out"
    if kind in ("FilterDataset", "TakeWhileDataset") and any(
        drawing_ops(function.function.graph) for function in one._functions()
    ):
        return "elements that are chosen at random. Choose them before"
    return None


def _is_interleaved_at_will(one: tf.data.Dataset) -> bool:
    # Only the graph knows it; it holds the names of files, and seldom more.
    content = tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(one), external_state_policy=1
    )
    definition = tf.compat.v1.GraphDef.FromString(content.numpy())
    return any(node.attr["deterministic"].s == b"false" for node in definition.node)


def warn_of_draws(what: str, ops: set[str]) -> None:
    """Warns of ops that draw before samples are kept."""
    if ops:
        log.warning(
            "datacache: %s draws at random (%s): each sample is drawn once and kept. Augment after "
            "the cache: cache.dataset(...).map(augment)",
            what,
            ", ".join(sorted(ops)),
        )


def _draws(name: str) -> bool:
    op = op_def_registry.get(name)
    if op is None or not op.is_stateful:
        return False
    attributes = {attribute.name for attribute in op.attr}
    has_seed = "seed" in attributes or bool(_inputs(name) & {"seed", "alg", "algorithm"})
    return has_seed or name in _UNSTEADY or re.match("Assign.*VariableOp", name) is not None


def _inputs(name: str) -> set[str]:
    op = op_def_registry.get(name)
    return set() if op is None else {argument.name for argument in op.input_arg}
