"""Ops and steps of a `tf.data.Dataset`, for which TensorFlow has no public API."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

PYTHON_OPS = {"PyFunc", "EagerPyFunc", "PyFuncStateless"}
"""Ops that call Python."""
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


def serialized(dataset: tf.data.Dataset) -> Any:
    """Returns the `GraphDef` of a dataset, which contains its data if they are in memory."""
    content = tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(dataset), external_state_policy=1
    )
    return tf.compat.v1.GraphDef.FromString(content.numpy())


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
