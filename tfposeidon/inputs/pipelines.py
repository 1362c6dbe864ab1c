"""Shards a `tf.data.Dataset` over ranks: slices it, and applies the later steps to the slice.

Think of a pipeline as a chain of steps that begins with a source. A share is exact only if it is
taken where the order of elements is equal on all ranks, which is before the first shuffle.
TensorFlow's auto-sharding (policy DATA) slices after the last step, and therefore after the
shuffle. `share_of` slices after the last step that depends on the position or number of elements
(`take`, `zip`), and applies the later steps to the slice, with the same functions, seeds and
resources.

This module uses private attributes, because TensorFlow has no public API for the ops, functions and
inputs of datasets.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops, readers
from tensorflow.python.framework import op_def_registry

PYTHON_OPS = {"PyFunc", "EagerPyFunc", "PyFuncStateless"}
"""Ops that call Python."""
# Results of these ops differ between runs, although they are not stateful or have no seed.
_UNSEEDED = {"Timestamp", "NonDeterministicInts", "FractionalMaxPool", "FractionalAvgPool"}
# This pattern matches ops that change a variable.
_WRITES = "Assign.*VariableOp|Resource(Scatter|Apply|SparseApply|StridedSliceAssign|CountUpTo)"

# These arguments of ops are names of files.
_PATHS = {"filename", "filenames", "pattern"}

# Dataset classes, without the suffix "Dataset", that yield one element for each input element.
_ELEMENTWISE = {"Map", "ParallelMap", "Prefetch", "Options", "Restructured"}
# These steps yield any number of elements for each input element.
_SELECTING = {
    *("Filter", "FlatMap", "Unbatch"),
    *("Interleave", "ParallelInterleave", "LegacyParallelInterleave"),
}
# These steps order, repeat, batch or store elements, and act on a share as on all elements.
_GROUPING = {
    *("Shuffle", "Repeat", "Batch", "ParallelBatch", "PaddedBatch", "Cache", "GroupByWindow"),
}
_APPLICABLE = _ELEMENTWISE | _SELECTING | _GROUPING
# These steps select elements only by position.
_BY_POSITION = {
    *(_ELEMENTWISE | _GROUPING - {"GroupByWindow"}),
    *("Tensor", "TensorSlice", "Range", "Zip", "Concatenate"),
    *("Take", "Skip", "Window", "AssertCardinality"),
}
# Results of these steps may differ between ranks if their function calls Python.
_WITH_FUNCTION = {"Map", "ParallelMap", "Filter"}
# In a function, or in a dataset with hidden steps, the order of these ops may differ between ranks.
_UNKNOWN_ORDER = ("Shuffle", "RandomDataset", "OptionsDataset")


# ------------------------------------------------------------------ ops and datasets


def nodes_of_graph(definition: Any) -> Iterator[Any]:
    """Yields the `NodeDef` of each op of a `GraphDef`, and of the functions that it calls."""
    yield from definition.node
    for function in definition.library.function:
        yield from function.node_def


def op_names(graph: Any) -> set[str]:
    """Returns the names of the ops of a graph, and of the functions that it calls."""
    return {node.op for node in nodes_of_graph(graph.as_graph_def())}


def drawing_ops(names: set[str]) -> set[str]:
    """Returns the names of ops whose results may differ between runs."""
    return set(filter(_draws, names))


def file_ops(names: set[str]) -> set[str]:
    """Returns the names of ops that read files by their file names."""
    found = {name: op_def_registry.get(name) for name in names}
    return {name for name, op in found.items() if op and _PATHS & {a.name for a in op.input_arg}}


def datasets(data: Any) -> Iterator[tf.data.Dataset]:
    """Yields all inputs of a dataset, recursively, and the dataset itself last."""
    if isinstance(data, tf.data.Dataset):
        for source in data._inputs():
            yield from datasets(source)
        yield data


def function_graphs(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields the graph of each function of a dataset and of its inputs, recursively."""
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
    # Ops whose results differ between runs are stateful, and have a seed or a generator, read a
    # clock, or change a variable. Generators of Keras's random layers change a variable.
    if name in _UNSEEDED:
        return True
    op = op_def_registry.get(name)
    # Datasets within a function are analyzed separately.
    if op is None or not op.is_stateful or re.search(r"Dataset(V\d+)?$", name):
        return False
    arguments = {argument.name for argument in (*op.attr, *op.input_arg)}
    return bool(arguments & {"seed", "alg", "algorithm"}) or re.match(_WRITES, name) is not None


# ------------------------------------------------------------------ share


def share_of(dataset: tf.data.Dataset, rank: int, size: int) -> tf.data.Dataset:
    """Returns a rank's share of a dataset; raises `ValueError` if no step has an exact share."""
    steps = chain(dataset)
    position = _position(steps, size)
    caches = [d for d in unwrapped_datasets(steps[position]) if _step_kind(d) == "Cache"]
    if any(cache._filename.numpy() for cache in caches):
        raise _refusal(
            f"a file cache in {kind_of(steps[position])} or an earlier step; all ranks would write "
            "the same cache file",
            "Move `.cache(filename)` after that step.",
        )
    share = steps[position].shard(size, rank)
    for step in steps[position + 1 :]:
        share = _applied_to(share, step, f".{rank}_of_{size}")
    return share


def chain(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns the steps of a dataset from its source, or from its last step with several inputs."""
    steps = [_unwrapped(dataset)]
    while len(inputs := steps[0]._inputs()) == 1:
        steps.insert(0, _unwrapped(inputs[0]))
    return steps


def _unwrapped(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the inner dataset of a file reader, such as `TFRecordDataset`, or the dataset."""
    return _unwrapped(dataset._impl) if hasattr(dataset, "_impl") else dataset


def _step_kind(step: tf.data.Dataset) -> str:
    # The class that reads files in parallel has the same name as a class with another op.
    is_legacy = isinstance(step, readers.ParallelInterleaveDataset)
    return ("Legacy" if is_legacy else "") + kind_of(step).removesuffix("Dataset")


def groups(step: tf.data.Dataset) -> bool:
    return _step_kind(step) in _GROUPING


def _position(steps: list[tf.data.Dataset], size: int) -> int:
    """Returns the index of the step after which the slice is exact."""
    end = first_random(steps)
    # Steps that are not applicable depend on positions or on the number of all elements, so slice
    # after them.
    whole = [i for i, step in enumerate(steps) if i and _step_kind(step) not in _APPLICABLE]
    start = whole[-1] if whole else 0
    if start >= end:
        depends = f", which depends on the order of {kind_of(steps[end])}" if start > end else ""
        raise _refusal(kind_of(steps[start]) + depends)
    if is_share(steps[-1]):
        raise ValueError(
            "A dataset must be sharded only once. Received: a dataset with a `shard` step. Remove "
            "that step, or do not call tp.shard."
        )
    balanced = _balanced(steps, start, end, size)
    for position in (balanced, end - 1):
        # TensorFlow returns negative numbers for unknown and infinite cardinalities.
        if not 0 <= int(steps[position].cardinality()) < size:
            return position
    if any(_step_kind(step) in _SELECTING for step in steps[end:]):
        # A `shard` after the shuffle would select from a different order on each rank.
        raise _refusal(
            f"fewer than {size} elements before {kind_of(steps[end])}",
            f"Provide at least {size} elements there, or shuffle after a step that yields more "
            "elements. To read files, use tf.data.TFRecordDataset(tf.data.Dataset.list_files("
            "pattern, shuffle=False)).",
        )
    return balanced


def is_share(dataset: tf.data.Dataset) -> bool:
    """Returns whether a dataset has a `shard` step, including in functions of steps."""
    return any(
        "ShardDataset" in {kind_of(step), *(node.op for node in nodes_of_step(step))}
        for step in unwrapped_datasets(dataset)
    )


def _balanced(steps: list[tf.data.Dataset], start: int, end: int, size: int) -> int:
    """Returns the index of the first step after which shares are equal, in elements or in files."""
    position = start
    for index in range(start + 1, end):
        if groups(steps[index]):
            break
        if _step_kind(steps[index]) in _SELECTING:
            ops = {node.op for node in nodes_of_step(steps[index])}
            if file_ops(ops) and int(steps[index - 1].cardinality()) >= size:
                break
            position = index
    return position


def first_random(steps: list[tf.data.Dataset]) -> int:
    """Returns the index of the first step whose order may differ between ranks, or `len(steps)`."""
    draws = False
    is_free = steps[-1].options().deterministic is False
    for index, step in enumerate(steps):
        # The first step may have several inputs.
        for one in [step] if index else unwrapped_datasets(step):
            kind, ops = _step_kind(one), {node.op for node in nodes_of_step(one)}
            draws |= kind == "Random" or bool(drawing_ops(ops))
            draws |= kind in _WITH_FUNCTION and bool(ops & PYTHON_OPS)
            if _reorders(one, is_free) or (draws and kind not in _BY_POSITION):
                return index
    return len(steps)


def unwrapped_datasets(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Returns an iterator over `datasets(dataset)` in which file readers are unwrapped.

    Each file reader, such as `TFRecordDataset`, is replaced by its inner dataset.
    """
    return map(_unwrapped, datasets(dataset))


def _reorders(step: tf.data.Dataset, is_free: bool) -> bool:
    return (
        _deterministic(step) in ({"false", "default"} if is_free else {"false"})
        # With AUTOTUNE, TensorFlow chooses the cycle length by the rank's number of processors.
        or int(getattr(step, "_cycle_length", 0)) == tf.data.AUTOTUNE
        or _step_kind(step).startswith("Shuffle")
        or any(
            node.op.startswith(_UNKNOWN_ORDER) or node.attr["deterministic"].s == b"false"
            for node in nodes_of_step(step)
        )
    )


def _deterministic(step: tf.data.Dataset) -> str | None:
    if _step_kind(step) != "ParallelInterleave":
        return getattr(step, "_deterministic", None)
    # The Python object of this step does not store `deterministic`, but the step's graph does.
    last = [node for node in serialized(step).node if node.op.startswith("ParallelInterleave")][-1]
    return last.attr["deterministic"].s.decode()


def nodes_of_step(step: tf.data.Dataset) -> Iterator[Any]:
    """Yields the `NodeDef` of each op in a step's functions, or in a dataset with hidden steps."""
    definitions = [one.function.graph.as_graph_def() for one in step._functions()]
    if _step_kind(step) == "Variant":
        definitions.append(serialized(step))
    for definition in definitions:
        yield from nodes_of_graph(definition)


def _applied_to(share: tf.data.Dataset, step: tf.data.Dataset, suffix: str) -> tf.data.Dataset:
    """Returns the same step with another input, without tracing its functions again.

    A cache in a file uses another file, with `suffix` at the end of its name.
    """
    kind = _step_kind(step)
    if kind == "Options":
        return share.with_options(step.options())
    if kind == "Restructured":
        return type(step)(share, step.element_spec)
    if kind == "Prefetch":
        return share.prefetch(int(step._buffer_size))
    # Steps use the latest version of their op.
    names = (f"{kind}Dataset{version}" for version in ("V4", "V3", "V2", ""))
    op = next(getattr(tf.raw_ops, name) for name in names if hasattr(tf.raw_ops, name))
    given = _arguments(step) | {"input_dataset": tf.data.experimental.to_variant(share)}
    if given.get("filename", b"") != b"":
        given["filename"] = tf.strings.join([given["filename"], suffix])
    parameters = inspect.signature(op).parameters
    variant = op(**{name: value for name, value in given.items() if name in parameters})
    again = copy.copy(step)
    dataset_ops.UnaryDataset.__init__(again, share, variant)
    return again


def _arguments(step: tf.data.Dataset) -> dict[str, Any]:
    """Returns the arguments of a step's op by name, among other values."""
    # TensorFlow's constructors of steps pass the same values to the op.
    found = {name[1:]: value for name, value in vars(step).items() if name.startswith("_")}
    found |= step._common_args
    found["seed_generator"] = tf.raw_ops.DummySeedGenerator()
    found["cache"] = tf.raw_ops.DummyMemoryCache()
    found["deterministic"] = _deterministic(step)
    for name, value in list(found.items()):
        if name in ("padded_shapes", "padding_values"):
            found[name] = tf.nest.flatten(value)
        elif hasattr(value, "function"):
            captured = value.function.captured_inputs
            found |= {"f": value.function, name: value.function}
            found |= {"other_arguments": captured, f"{name}_other_arguments": captured}
    return found


def _refusal(received: str, remedy: str | None = None) -> ValueError:
    return ValueError(
        "A share of a tf.data.Dataset must be taken where the order of its elements is equal on "
        f"all ranks: before the first shuffle. Received: {received}. "
        + (remedy or "Write `dataset = dataset.shard(tp.size(), tp.rank())` before `.shuffle`.")
    )
