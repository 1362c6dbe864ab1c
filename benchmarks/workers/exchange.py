"""Times single exchanges, alternating between systems, and counts the bytes that they send."""

import functools
import gc
import itertools
import time

import tensorflow as tf

import tfposeidon as tp
from benchmarks.exchanges import (
    DENSITIES,
    PRODUCT_ROWS,
    factors_named,
    scheme_named,
    sent_by_node,
    transfer_named,
)
from benchmarks.workers.task import Task
from tfposeidon import ops
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.factors.pairs import FactorPair
from tfposeidon.lab.network import payload_bytes

LEAST_ROUNDS, MOST_ROUNDS = 3, 20
LEAST_S = 0.8


def main():
    task = Task.from_argument()
    tp.init()
    named = [cell.rsplit(" ", 1) for cell in task.cells]
    # Measure one size at a time, so that memory holds variables of one size only.
    by_size = sorted(named, key=lambda cell: [int(part) for part in cell[1].split("x")])
    for size, cells in itertools.groupby(by_size, key=lambda cell: cell[1]):
        measure([system for system, _ in cells], size, task)
        gc.collect()


def measure(systems, size, task):
    """Times exchanges of one size, alternating between systems, and records times and bytes."""
    wire = runtime.wire()
    exchanges = {system: traced(system, size, wire) for system in systems}
    # The slowest time is the same on all ranks, so all run the same number of repetitions.
    expected_s = {system: slowest(wire, call) for system, call in exchanges.items()}
    rounds = {
        system: max(LEAST_ROUNDS, min(MOST_ROUNDS, round(LEAST_S / max(seconds, 1e-4))))
        for system, seconds in expected_s.items()
    }
    times, sent = ({system: [] for system in systems} for _ in range(2))
    for number in range(max(rounds.values())):
        for system in systems:
            if number < rounds[system]:
                before = payload_bytes()
                times[system].append(slowest(wire, exchanges[system]))
                sent[system].append(payload_bytes() - before)
    for system in systems:
        nodes = sent_by_node(system, size, wire.topology)
        answer = {
            "step_s": times[system],
            "sent_bytes": sum(sent[system]) / len(sent[system]),
            "predicted_bytes": nodes[wire.topology.node_index],
            "busiest_bytes": max(nodes),
        }
        task.note(f"{system} {size}", answer)


def traced(system, size, wire):
    """Returns a function that runs one exchange; it has been traced and called once."""
    # Names of TensorFlow's ops must not contain colons.
    label = f"bench.{system}.{size}".replace(":", "_").replace("@", "_")
    exchange = tf.function(_exchange_of(system, size, wire, label))
    # Trace before timing, because tracing takes a different time on each rank.
    exchange()
    return exchange


def _exchange_of(system, size, wire, label):
    if system.endswith("@work"):
        return _local_work(system.removesuffix("@work"), int(size))
    if "@" in system:
        return _collective(system, int(size), wire, label)
    if "x" in size:
        scheme, shape = factors_named(system, size)
        left = _drawn((shape.rows, shape.left), wire)
        right = _drawn((shape.rows, shape.right), wire)
        return lambda: scheme.exchange_factors(
            FactorPair(left.read_value(), right.read_value()), wire, label
        )
    scheme, length = scheme_named(system), int(size)
    vector, state = _drawn((length,), wire), fresh_state(scheme, length, wire)
    return lambda: exchanged(scheme, vector, state, wire, label)


def _collective(system, length, wire, label):
    transfer, vector = transfer_named(system, length, wire.topology), _drawn((length,), wire)
    if transfer.itemsize == 2:
        vector = tf.Variable(tf.cast(vector, tf.float16))
    if transfer.operation == "all_reduce":
        return lambda: wire.all_reduce(vector.read_value(), transfer.group, label)
    if transfer.operation == "all_gather":
        return lambda: wire.all_gather(vector.read_value(), transfer.group, label)
    splits = [int(part) // transfer.itemsize for part in transfer.parts_bytes]
    return lambda: wire.all_to_all(vector.read_value(), splits, transfer.group, label)


def _local_work(kind, length):
    """Returns a function for one kind of local work, on `length` elements."""
    count = max(1, round(DENSITIES.get(kind, 0.0) * length))
    vector = tf.Variable(tf.random.stateless_normal([length], [1, length]))
    if kind == "nothing":
        # This measures the call of a function, which all other times include.
        return lambda: vector[:1]
    if kind == "sum":
        # The sum of four vectors represents the work of a shard owner.
        return lambda: tf.reduce_sum(tf.reshape(vector, [4, -1]), 0)
    if kind == "encode":
        return lambda: ops.encode(vector.read_value(), "float16")
    if kind in ("select", "select_many"):
        residual = tf.Variable(tf.zeros([length]))
        return lambda: ops.error_feedback_top_k(residual.read_value(), vector.read_value(), count)
    if kind == "scatter":
        indices = tf.Variable(tf.range(0, length, length // count, tf.int32)[:count])
        return lambda: ops.scatter_add(vector[:count], indices.read_value(), length)
    side = round(length**0.5)
    matrix = tf.reshape(vector[: side * side], [side, side])
    left = tf.Variable(matrix[:PRODUCT_ROWS])
    return lambda: tf.matmul(left.read_value(), left.read_value(), transpose_a=True)


@functools.lru_cache(maxsize=2)
def _drawn(shape, wire):
    """Returns a read-only variable that all systems of one size share."""
    return tf.Variable(tf.random.stateless_normal(shape, [wire.topology.rank, shape[-1]]))


def fresh_state(scheme, length, wire):
    """Returns variables of zeros for the state of the scheme."""
    return [tf.Variable(tf.zeros(slot.shape)) for slot in scheme.slots(length, wire.topology)]


def exchanged(scheme, vector, state, wire, name):
    """Returns the mean of a variable over ranks, and updates `state`, as the optimizer does."""
    mean, new = scheme.exchange(
        vector.read_value(), tuple(map(tf.convert_to_tensor, state)), wire, name
    )
    for variable, value in zip(state, new, strict=True):
        variable.assign(value)
    return mean


def slowest(wire, function):
    """Calls a function on all ranks at the same time.

    Args:
      wire: The collectives.
      function: Function to time.

    Returns:
      Seconds of the slowest rank.
    """
    exchange_objects(None, wire, "bench.begin")
    begin = time.perf_counter()
    function()
    return max(exchange_objects(time.perf_counter() - begin, wire, "bench.end"))


if __name__ == "__main__":
    main()
