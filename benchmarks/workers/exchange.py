"""Times single exchanges of one vector, by every scheme and length that is asked for."""

import dataclasses
import time

import tensorflow as tf

import tfposeidon as tp
from benchmarks.workers.task import Task
from tfposeidon import ops
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.lab.network import payload_bytes
from tfposeidon.schemes import REGISTRY
from tfposeidon.schemes.wire_format import WIRE_DTYPES

LEAST_REPEATS, MOST_REPEATS = 3, 50
LEAST_S = 0.5


def main():
    task = Task.from_argument()
    topology = tp.init()
    for length in task.lengths:
        vector = tf.Variable(tf.random.stateless_normal([length], [topology.rank, length]))
        for name in task.systems:
            task.note(f"{name} {length}", measured(task, name, length, vector))


def measured(task, name, length, vector):
    """Returns times of an exchange, and bytes that were sent and predicted."""
    scheme, wire = scheme_named(name), runtime.wire()
    # Names of TensorFlow's ops must not have colons.
    label = f"bench.{name}.{length}".replace(":", "_")

    state = fresh_state(scheme, length, wire)

    @tf.function
    def exchange():
        return exchanged(scheme, vector, state, wire, label)

    # The first call traces. All ranks make equally many, as the slowest time is the same on all.
    slowest(wire, exchange)
    repeats = max(
        LEAST_REPEATS, min(MOST_REPEATS, round(LEAST_S / max(slowest(wire, exchange), 1e-4)))
    )
    sent = payload_bytes()
    times = [slowest(wire, exchange) for _ in range(repeats)]
    costs = [
        scheme.cost(length, 4, wire.topology.seen_from(rank)) for rank in range(wire.topology.size)
    ]
    nodes = [sum(costs[rank].cross_bytes for rank in node) for node in wire.topology.nodes]
    return {
        "step_s": times,
        "sent_bytes": (payload_bytes() - sent) / repeats,
        "predicted_bytes": nodes[wire.topology.node_index],
        "busiest_bytes": max(nodes),
    }


def scheme_named(name):
    """Returns a scheme by its name, with options behind colons.

    Args:
      name: Such as "2dtar:float16" or "hitopk:0.001:exact".
    """
    name, *options = name.split(":")
    scheme = REGISTRY[name]()
    for option in options:
        scheme = dataclasses.replace(scheme, **{_field(option): _value(option)})
    return scheme


def _field(option):
    if option in ops.METHODS:
        return "select"
    return "wire_dtype" if option in WIRE_DTYPES else "density"


def _value(option):
    return option if option in (*ops.METHODS, *WIRE_DTYPES) else float(option)


def fresh_state(scheme, length, wire):
    """Returns variables of zeros for what the scheme keeps."""
    return [tf.Variable(tf.zeros(slot.shape)) for slot in scheme.slots(length, wire.topology)]


def exchanged(scheme, vector, state, wire, name):
    """Returns the mean of a variable; `state` becomes the new one, as in the optimizer."""
    mean, new = scheme.exchange(
        vector.read_value(), tuple(map(tf.convert_to_tensor, state)), wire, name
    )
    for variable, value in zip(state, new, strict=True):
        variable.assign(value)
    return mean


def slowest(wire, function):
    """Calls a function on all ranks at once.

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
