"""This rank's share of a `tf.data.Dataset`: the place of the slice, and the steps after it.

Think of a pipeline as a chain of steps from a source to the last one. A share is exact only where
the order of elements is equal on all ranks, which ends with the first shuffle; TensorFlow's own
automatic sharding by data slices the end of the chain, behind the shuffle. So the slice is put
behind the last step that depends on the position or number of elements (`take`, `zip`), and the
later steps are applied to it again, with the same functions, seeds and resources.

The first functions read ops and inputs of datasets, for which TensorFlow has no public API.
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
_UNSTEADY = {"Timestamp", "NonDeterministicInts", "FractionalMaxPool", "FractionalAvgPool"}
"""Random ops that are not stateful, or have neither a seed nor a generator."""
_WRITES = "Assign.*VariableOp|Resource(Scatter|Apply|SparseApply|StridedSliceAssign|CountUpTo)"

_ALONE = {
    "MapDataset": "MapDataset",
    "ParallelMapDataset": "ParallelMapDatasetV2",
    "PrefetchDataset": "PrefetchDataset",
    "OptionsDataset": "OptionsDataset",
    "RestructuredDataset": "",  # of `unbatch`, and not an op
}
"""Classes of steps that make one element of each, with their ops."""
_SELECTING = {
    "FilterDataset": "FilterDataset",
    "FlatMapDataset": "FlatMapDataset",
    "InterleaveDataset": "InterleaveDataset",
    "ParallelInterleaveDataset": "ParallelInterleaveDatasetV4",
    "LegacyParallelInterleaveDataset": "LegacyParallelInterleaveDatasetV2",
    "UnbatchDataset": "UnbatchDataset",
}
"""Steps that make any number of elements of each one."""
_GROUPING = {
    "ShuffleDataset": "ShuffleDatasetV3",
    "RepeatDataset": "RepeatDataset",
    "BatchDataset": "BatchDatasetV2",
    "ParallelBatchDataset": "ParallelBatchDataset",
    "PaddedBatchDataset": "PaddedBatchDatasetV2",
    "CacheDataset": "CacheDatasetV2",
    "GroupByWindowDataset": "GroupByWindowDataset",
}
"""Steps that order, repeat, batch or hold the elements of a share as they do those of all."""
_OPS = _ALONE | _SELECTING | _GROUPING
_IN_POSITION = {
    *(set(_ALONE | _GROUPING) - {"GroupByWindowDataset"}),
    *("TensorDataset", "TensorSliceDataset", "RangeDataset", "ZipDataset", "ConcatenateDataset"),
    *("TakeDataset", "SkipDataset", "WindowDataset", "AssertCardinalityDataset"),
}
"""Steps that select elements by their position alone."""
_PER_ELEMENT = {"MapDataset", "ParallelMapDataset", "FilterDataset"}
"""Steps whose function may differ between ranks if it calls Python, such as NumPy's generators."""
_UNKNOWN_ORDER = ("Shuffle", "RandomDataset", "OptionsDataset")
"""Ops within a function, or within a dataset without steps, whose order may differ."""


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


def function_graphs(dataset: tf.data.Dataset) -> Iterator[Any]:
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


# ------------------------------------------------------------------ share


def share_of(dataset: tf.data.Dataset, rank: int, size: int) -> tf.data.Dataset:
    """Returns a rank's share of a dataset, or raises an error with the line to write instead."""
    steps = chain(dataset)
    place = _place(steps, size)
    if any(
        _step_kind(one) == "CacheDataset" and one._filename.numpy()
        for one in unwrapped_datasets(steps[place])
    ):
        raise _refusal(
            f"a cache in a file before {_step_kind(steps[place])}, which all ranks would write",
            "Put the cache behind that step.",
        )
    share = steps[place].shard(size, rank)
    for step in steps[place + 1 :]:
        share = _applied_to(share, step, f".{rank}_of_{size}")
    return share


def chain(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns the steps of a dataset, the last one last.

    The first one is a source, or a step with several inputs.
    """
    steps = [_unwrapped(dataset)]
    # TensorFlow has no public API for the inputs of a dataset.
    while len(inputs := steps[0]._inputs()) == 1:
        steps.insert(0, _unwrapped(inputs[0]))
    return steps


def _unwrapped(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset within a reader of files, such as `TFRecordDataset`."""
    return _unwrapped(dataset._impl) if hasattr(dataset, "_impl") else dataset


def _step_kind(step: tf.data.Dataset) -> str:
    """Returns the name of a step's class without underscores."""
    # That of files which are read in parallel has the name of another step, with another op.
    is_legacy = isinstance(step, readers.ParallelInterleaveDataset)
    return ("Legacy" if is_legacy else "") + kind_of(step)


def groups(step: tf.data.Dataset) -> bool:
    """Returns whether a step orders, repeats, batches or holds elements."""
    return _step_kind(step) in _GROUPING


def _place(steps: list[tf.data.Dataset], size: int) -> int:
    """Returns the index of the step behind which the slice is exact."""
    end = first_random(steps)
    # Such steps see positions or numbers of all elements, and stay before the slice.
    whole = [index for index, step in enumerate(steps) if index and not _can_follow(step)]
    start = whole[-1] if whole else 0
    if start >= end:
        behind = f", which depends on the order of {_step_kind(steps[end])}" if start > end else ""
        raise _refusal(_step_kind(steps[start]) + behind)
    if is_share(steps[-1]):
        raise _refusal("a dataset with a `shard`", "Leave out either it or tp.shard.")
    place = _balanced(steps, start, end, size)
    if _has_at_least(steps[place], size):
        return place
    if _has_at_least(steps[end - 1], size):
        return end - 1
    if any(_step_kind(step) in _SELECTING for step in steps[end:]):
        # Behind that step, a `shard` would select from another order on each rank.
        raise _refusal(
            f"fewer than {size} elements before {_step_kind(steps[end])}",
            "Provide one for each rank, or shuffle later. For files: tf.data.TFRecordDataset("
            "tf.data.Dataset.list_files(pattern, shuffle=False)).",
        )
    return place


def is_share(dataset: tf.data.Dataset) -> bool:
    """Returns whether a dataset has a `shard`, also within a function of a step."""
    return any(
        _step_kind(step) == "ShardDataset"
        or any(node.op == "ShardDataset" for node in nodes_of_step(step))
        for step in unwrapped_datasets(dataset)
    )


def _balanced(steps: list[tf.data.Dataset], start: int, end: int, size: int) -> int:
    """Returns the first place with equal shares, or the list of files if there are enough."""
    place = start
    for index in range(start + 1, end):
        if groups(steps[index]):
            break
        if _step_kind(steps[index]) in _SELECTING:
            if _reads_files(steps[index]) and int(steps[index - 1].cardinality()) >= size:
                break
            place = index
    return place


def _can_follow(step: tf.data.Dataset) -> bool:
    """Returns whether a step may be applied to a share instead of all elements."""
    return _step_kind(step) in _OPS


def first_random(steps: list[tf.data.Dataset]) -> int:
    """Returns the index of the first step whose order may differ between ranks, or the length."""
    draws = False
    is_free = steps[-1].options().deterministic is False
    for index, step in enumerate(steps):
        # The first step may have several inputs.
        for one in [step] if index else unwrapped_datasets(step):
            ops = {node.op for node in nodes_of_step(one)}
            draws = draws or _step_kind(one) == "RandomDataset" or bool(drawing_ops(ops))
            draws = draws or (_step_kind(one) in _PER_ELEMENT and bool(ops & PYTHON_OPS))
            selects = _step_kind(one) not in _IN_POSITION
            if _reorders(one, is_free) or (draws and selects):
                return index
    return len(steps)


def unwrapped_datasets(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Returns all steps of a dataset and of its inputs, the last one last."""
    return map(_unwrapped, datasets(dataset))


def _reorders(step: tf.data.Dataset, is_free: bool) -> bool:
    deterministic = _deterministic(step)
    if deterministic == "false" or (is_free and deterministic == "default"):
        return True
    # TensorFlow then chooses by the processors of the rank.
    if int(getattr(step, "_cycle_length", 0)) == tf.data.AUTOTUNE:
        return True
    return _step_kind(step).startswith("Shuffle") or any(
        node.op.startswith(_UNKNOWN_ORDER) or node.attr["deterministic"].s == b"false"
        for node in nodes_of_step(step)
    )


def _deterministic(step: tf.data.Dataset) -> str | None:
    if _step_kind(step) != "ParallelInterleaveDataset":
        return getattr(step, "_deterministic", None)
    # Its Python object does not have the argument, but its graph does.
    op = _SELECTING["ParallelInterleaveDataset"]
    last = [node for node in serialized(step).node if node.op == op][-1]
    return last.attr["deterministic"].s.decode()


def nodes_of_step(step: tf.data.Dataset) -> Iterator[Any]:
    """Yields the `NodeDef` of each op in a step's functions, or of a dataset without steps."""
    definitions = [one.function.graph.as_graph_def() for one in step._functions()]
    if _step_kind(step) == "VariantDataset":
        definitions.append(serialized(step))
    for definition in definitions:
        yield from nodes_of_graph(definition)


def _reads_files(step: tf.data.Dataset) -> bool:
    return bool(file_ops({node.op for node in nodes_of_step(step)}))


def _has_at_least(step: tf.data.Dataset, size: int) -> bool:
    number = int(step.cardinality())
    # Unknown and infinite numbers are negative.
    return number < 0 or number >= size


def _applied_to(share: tf.data.Dataset, step: tf.data.Dataset, suffix: str) -> tf.data.Dataset:
    """Returns the same step with another input; its functions are not traced again.

    A cache in a file receives a file of its own, whose name ends in `suffix`.
    """
    if _step_kind(step) == "OptionsDataset":
        return share.with_options(step.options())
    if _step_kind(step) == "RestructuredDataset":
        return type(step)(share, step.element_spec)
    if _step_kind(step) == "PrefetchDataset":
        return share.prefetch(int(step._buffer_size))
    op = getattr(tf.raw_ops, _OPS[_step_kind(step)])
    given = _arguments(step) | {"input_dataset": tf.data.experimental.to_variant(share)}
    if given.get("filename", b"") != b"":
        given["filename"] = tf.strings.join([given["filename"], suffix])
    names = inspect.signature(op).parameters
    variant = op(**{name: value for name, value in given.items() if name in names})
    again = copy.copy(step)
    dataset_ops.UnaryDataset.__init__(again, share, variant)
    return again


def _arguments(step: tf.data.Dataset) -> dict[str, Any]:
    """Returns the arguments of a step's op by name, and others."""
    # TensorFlow's constructors of steps pass the same values.
    found = {name[1:]: value for name, value in vars(step).items() if name.startswith("_")}
    found |= step._common_args
    for name, value in list(found.items()):
        if hasattr(value, "function"):
            found |= {"f": value.function, name: value.function}
            captured = value.function.captured_inputs
            found |= {"other_arguments": captured, f"{name}_other_arguments": captured}
    for name in ("padded_shapes", "padding_values"):
        if name in found:
            found[name] = tf.nest.flatten(found[name])
    if _step_kind(step) == "ParallelInterleaveDataset":
        found["deterministic"] = _deterministic(step)
    if _step_kind(step) == "ShuffleDataset":
        found["seed_generator"] = tf.raw_ops.DummySeedGenerator()
    if _step_kind(step) == "CacheDataset":
        found["cache"] = tf.raw_ops.DummyMemoryCache()
    return found


def _refusal(received: str, remedy: str | None = None) -> ValueError:
    return ValueError(
        "A share of a tf.data.Dataset must be taken where the order of its elements is equal on "
        f"all ranks: before the first shuffle. Received: {received}. "
        + (remedy or "Write `dataset = dataset.shard(tp.size(), tp.rank())` before `.shuffle`.")
    )
