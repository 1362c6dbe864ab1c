"""Equality of replicas: variables are broadcast, averaged and compared over ranks."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfposeidon.communication import agreement
from tfposeidon.communication.wire import Wire, exchange_objects
from tfposeidon.exchange.one_vector import joined, parted
from tfposeidon.exchange.variable_agreement import as_json, check_same_variables
from tfposeidon.gradients.description import Description

# What Horovod does not carry travels as whole numbers of the same width.
_CARRIED_AS = {"bfloat16": tf.uint16, "uint32": tf.int32, "uint64": tf.int64}


def describe_any(variables: Sequence[Any]) -> list[Description]:
    """Returns descriptions of variables of any dtype.

    Args:
      variables: Keras or TensorFlow variables.
    """
    named = [(getattr(v, "path", None) or v.name, v) for v in variables]
    return [Description(path, tuple(v.shape), tf.as_dtype(v.dtype).name) for path, v in named]


def broadcast(variables: Sequence[Any], wire: Wire, root_rank: int = 0) -> None:
    """Gives every rank the values of `root_rank`; all ranks call it together.

    Args:
      variables: Variables of any dtype, the same and in the same order on every rank.
      wire: Collectives that join the ranks.
      root_rank: Rank whose values everybody gets.

    Raises:
      RuntimeError: If ranks have other variables; it names the first difference.
    """
    if wire.topology.size == 1:
        return
    check_same_variables(exchange_objects(as_json(describe_any(variables)), wire, "tp.broadcast"))

    # In a graph broadcasts need not wait for one another.
    @tf.function
    def received() -> list[tf.Tensor]:
        return [
            _broadcast(v, wire, root_rank, f"tp.broadcast_{i}") for i, v in enumerate(variables)
        ]

    for variable, value in zip(variables, received(), strict=True):
        variable.assign(value)


def average(variables: Sequence[Any], wire: Wire) -> None:
    """Gives every rank the mean over ranks, computed in float32; all ranks call it together.

    Args:
      variables: Floating-point variables, the same and in the same order on every rank.
      wire: Collectives that join the ranks.
    """
    if wire.topology.size == 1 or not variables:
        return
    world = wire.topology.world
    mean = wire.all_reduce(joined(variables), world, "tp.average", scale=1.0 / world.size)
    for variable, part in zip(variables, parted(mean, variables), strict=True):
        variable.assign(part)


def checksums(variables: Sequence[Any]) -> list[int]:
    """Returns the CRC-32 of the bytes of each variable.

    Args:
      variables: Variables, tensors or arrays.
    """
    return [zlib.crc32(tf.convert_to_tensor(v).numpy().tobytes()) for v in variables]


def checksum(variables: Sequence[Any]) -> str:
    """Returns one checksum over all variables in order, as eight hexadecimal digits.

    Args:
      variables: Variables, tensors or arrays.

    >>> checksum([tf.constant([1.0, 2.0])])
    '24883919'
    """
    total = 0
    for part in checksums(variables):
        total = zlib.crc32(part.to_bytes(4, "big"), total)
    return f"{total:08x}"


def differences(variables: Sequence[Any], wire: Wire) -> dict[str, list[int]]:
    """Finds variables that are not bit-equal on all ranks; all ranks call it together.

    Args:
      variables: Variables, the same and in the same order on every rank.
      wire: Collectives that join the ranks.

    Returns:
      Path of each such variable -> the ranks that differ from rank 0.
    """
    everybody = exchange_objects(checksums(variables), wire, "tp.checksums")
    found: dict[str, list[int]] = {}
    for index, description in enumerate(describe_any(variables)):
        ranks = agreement.different_ranks([sums[index] for sums in everybody])
        if ranks:
            found[description.path] = ranks
    return found


def different_arrays(arrays: Mapping[str, np.ndarray], wire: Wire) -> dict[str, list[int]]:
    """Finds arrays that are not bit-equal on all ranks, or missing on some.

    All ranks call it together.

    Args:
      arrays: Arrays of this rank, by name.
      wire: Collectives that join the ranks.

    Returns:
      The ranks that differ from rank 0, by the name of each such array.
    """
    mine = {
        name: zlib.crc32(np.ascontiguousarray(array).tobytes()) for name, array in arrays.items()
    }
    everybody = exchange_objects(mine, wire, "tp.arrays")
    names = dict.fromkeys(name for sums in everybody for name in sums)
    found = {
        name: agreement.different_ranks([sums.get(name) for sums in everybody]) for name in names
    }
    return {name: ranks for name, ranks in found.items() if ranks}


def _broadcast(variable: Any, wire: Wire, root_rank: int, name: str) -> tf.Tensor:
    value = tf.convert_to_tensor(variable)
    carried = _CARRIED_AS.get(value.dtype.name)
    if carried is None:
        return wire.broadcast(value, root_rank, name)
    return tf.bitcast(wire.broadcast(tf.bitcast(value, carried), root_rank, name), value.dtype)
