"""Keeps replicas equal: broadcasts, averages and compares variables across ranks.

Replicas start with equal variables after a broadcast, and checksums detect whether they diverge.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfposeidon.checks import at_first_item, different_ranks, first_difference, require_equal
from tfposeidon.communication.wire import (
    Wire,
    broadcast_bytes,
    exchange_objects,
    from_horovod_dtype,
    pack,
    summed_dtype,
    to_horovod_dtype,
    unpack,
)
from tfposeidon.gradients import Description, path_of
from tfposeidon.state.placement import another_seed, is_seed

SAME_MODEL = "Build the same model and the same optimizer on every rank."


def variables_as_json(descriptions: Sequence[Description]) -> list[list[Any]]:
    """Returns `[path, shape, dtype]` of each description, for other ranks and checkpoints."""
    return [[d.path, list(d.shape), d.dtype] for d in descriptions]


def check_same_variables(received: Sequence[list[list[Any]]]) -> None:
    require_equal(
        [_renamed(received[0], other) for other in received],
        "All ranks must train the same variables",
        SAME_MODEL,
        at_first_item("variable", _readable),
    )


def first_different_variable(
    first: list[list[Any]], other: list[list[Any]]
) -> tuple[int, str, str] | None:
    """Returns the index of the first difference, and both variables as text; `None` if equal."""
    other = _renamed(first, other)
    return None if first == other else first_difference(first, other, _readable)


def is_same_path(first: str, other: str) -> bool:
    """Returns whether two paths may belong to the same variable, in two instances of a model.

    Keras generates names with numbers, which depend on earlier layers of the process. The path of a
    variable that was created before its model does not include the model's name.

    >>> is_same_path("dense/kernel", "sequential_3/dense_1/kernel")
    True
    >>> is_same_path("dense/kernel", "dense/bias")
    False
    """
    inner = (path.partition("/")[2] or path for path in (first, other))
    one, two = (re.sub(r"_\d+(?=_|/|$)", "", path) for path in inner)
    return one.endswith(two) or two.endswith(one)


def _renamed(first: list[list[Any]], other: list[list[Any]]) -> list[list[Any]]:
    """Returns `other` with the paths of `first` for variables that may be the same."""
    names = [path for path, _, _ in first]
    return [
        [name if name and is_same_path(name, path) else path, shape, dtype]
        for name, (path, shape, dtype) in zip([*names, *[""] * len(other)], other, strict=False)
    ]


def _readable(variable: list[Any]) -> str:
    path, shape, dtype = variable
    return f"{path!r} {tuple(shape)} {dtype}"


def describe_any(variables: Sequence[Any]) -> list[Description]:
    return [Description(path_of(v), tuple(v.shape), tf.as_dtype(v.dtype).name) for v in variables]


def broadcast(variables: Sequence[Any], wire: Wire, root_rank: int = 0) -> None:
    """Assigns the values of `root_rank` to the variables of every rank; collective.

    Raises an error if ranks have different variables. Seeds receive a different value on each rank.
    """
    if wire.topology.size == 1:
        return
    check_same_variables(
        exchange_objects(variables_as_json(describe_any(variables)), wire, "tp.broadcast")
    )
    texts = [variable for variable in variables if variable.dtype == tf.string]
    numbers = [variable for variable in variables if variable.dtype != tf.string]

    def received(index: int, value: tf.Tensor) -> tf.Tensor:
        sent = wire.broadcast(to_horovod_dtype(value), root_rank, f"tp.broadcast_{index}")
        return from_horovod_dtype(sent, value.dtype)

    def all_received() -> list[tf.Tensor]:
        return [received(*pair) for pair in enumerate(map(tf.convert_to_tensor, numbers))]

    # Run the broadcasts in a graph, in which they need not wait for one another. Use a concrete
    # function, because TensorFlow would warn about a function that every `fit` traces again.
    graph = tf.function(all_received, autograph=False).get_concrete_function()
    distance = (wire.topology.rank - root_rank) % wire.topology.size
    for variable, value in zip(numbers, graph(), strict=True):
        variable.assign(another_seed(value, distance) if is_seed(variable) else value)
    for number, variable in enumerate(texts):
        content = tf.io.serialize_tensor(tf.convert_to_tensor(variable)).numpy()
        content = broadcast_bytes(content, wire, root_rank, f"tp.text_{number}")
        variable.assign(tf.io.parse_tensor(content, tf.string))


def average(variables: Sequence[Any], wire: Wire) -> None:
    """Assigns the mean over ranks, in float32 or float64; all ranks call it together."""
    if wire.topology.size == 1 or not variables:
        return
    world = wire.topology.world
    values = pack(variables, summed_dtype(variables))
    mean = wire.all_reduce(values, world, "tp.average", scale=1.0 / world.size)
    for variable, part in zip(variables, unpack(mean, variables), strict=True):
        variable.assign(part)


def collect(variables: Sequence[Any], wire: Wire) -> None:
    """Assigns the sum over ranks on rank 0 and zeros on others; all ranks call it together."""
    world = wire.topology.world
    for number, variable in enumerate(variables if world.size > 1 else ()):
        flat = tf.reshape(tf.convert_to_tensor(variable), [-1])
        total = wire.all_reduce(flat, world, f"tp.collect_{number}")
        variable.assign(tf.reshape(total, variable.shape))
    if wire.topology.rank:
        clear(variables)


def clear(variables: Sequence[Any]) -> None:
    for variable in variables:
        variable.assign(tf.zeros_like(tf.convert_to_tensor(variable)))


def checksums(variables: Sequence[Any]) -> list[int]:
    """Returns a 64-bit checksum (FarmHash) of each variable's bytes, in one pass on the CPU."""
    flat = [tf.reshape(tf.convert_to_tensor(v), [1, -1]) for v in variables]
    return [int.from_bytes(tf.fingerprint(one).numpy().tobytes(), "big") for one in flat]


def checksum(variables: Sequence[Any]) -> str:
    """Returns one checksum over all variables, as eight hexadecimal digits.

    GPU tensors are not copied to the host, so their checksum differs from that of equal values on
    the CPU.

    >>> checksum([tf.constant([1.0, 2.0])])
    '0a27a754'
    """
    tensors = [tf.convert_to_tensor(variable) for variable in variables]
    on_gpus = [one for one in tensors if "GPU" in one.device]
    others = [one for one in tensors if "GPU" not in one.device]
    total = 0
    for part in (*checksums(others), *sums(on_gpus)):
        total = zlib.crc32(part.to_bytes(8, "big"), total)
    return f"{total:08x}"


def sums(tensors: Sequence[tf.Tensor]) -> list[int]:
    """Returns a 64-bit sum over the bytes of each tensor, with a weight per word.

    Weights are odd and random: at most one in 2**32 pairs of different tensors has equal sums. The
    cost is one pass over the tensors on their device, and 24 MiB of its memory. Strings are not
    supported.
    """
    if not tensors:
        return []
    weights = tf.constant(np.random.RandomState(0).randint(-(2**63), 2**63 - 1, 2**20, "int64") | 1)
    # Copy all sums in one transfer, because each transfer waits for the device.
    return [int(one) for one in tf.stack([_sum(t, weights) for t in tensors]).numpy().view("u8")]


def _sum(tensor: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    flat = tf.reshape(tensor, [-1])
    if flat.dtype.size == 1 and flat.dtype not in (tf.int8, tf.uint8):
        # TensorFlow cannot bit-cast booleans and 8-bit floats to integers.
        flat = tf.constant(flat.numpy().view("u1"))
    # Do not use 64-bit words: the last bits of many numbers are zero, so the last bits of weighted
    # sums of such words would be zero, too.
    word = {1: tf.uint8, 2: tf.uint16}.get(flat.dtype.size, tf.int32)
    step = len(weights) * word.size // flat.dtype.size
    total = tf.constant(0, tf.int64)
    for begin in range(0, flat.shape[0], step):
        # Slice first, because TensorFlow slices 32-bit integers on the host.
        words = tf.bitcast(flat[begin : begin + step], word)
        words = tf.cast(tf.reshape(words, [-1]), tf.int64)
        total = total * weights[0] + tf.reduce_sum(words * weights[: words.shape[0]])
    return total


def differences(
    variables: Sequence[Any], arrays: Mapping[str, np.ndarray], wire: Wire
) -> dict[str, list[int]]:
    """Maps the path of each value that is not bit-equal to the ranks that differ from rank 0."""
    # Identify variables by index, because their paths may differ between ranks.
    paths = {str(index): path_of(variable) for index, variable in enumerate(variables)}
    mine = dict(zip([*paths, *arrays], checksums([*variables, *arrays.values()]), strict=True))
    everybody = exchange_objects(mine, wire, "tp.checksums")
    keys = dict.fromkeys(key for sums in everybody for key in sums)
    found = [(key, different_ranks([sums.get(key) for sums in everybody])) for key in keys]
    return {paths.get(key, key): ranks for key, ranks in found if ranks}
