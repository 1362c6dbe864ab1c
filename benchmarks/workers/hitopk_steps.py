"""Times the four steps of HiTopKComm, each by omitting the later ones."""

import statistics

import tensorflow as tf

import tfposeidon as tp
from benchmarks.exchanges import scheme_named
from benchmarks.workers.exchange import exchanged, fresh_state, slowest
from benchmarks.workers.task import Task
from tfposeidon.communication import runtime
from tfposeidon.schemes import stages
from tfposeidon.schemes.wire_format import pack_pairs

REPEATS = 15


def main():
    task = Task.from_argument()
    tp.init()
    for system in task.systems:
        task.note(system, measured(scheme_named(system), task.elements, runtime.wire()))


class Prefixes:
    """The exchange, ended after each of its steps.

    Args:
      scheme: A `HiTopK`.
      elements: Length of the vector.
      wire: The collectives.
    """

    def __init__(self, scheme, elements, wire):
        self.scheme, self.wire = scheme, wire
        topology = wire.topology
        self.node = stages.Shards.even(elements, topology.node, owners=topology.positions)
        self.count = round(scheme.density * self.node.length_of(topology.rank))
        self.vector = tf.Variable(tf.random.stateless_normal([elements], [topology.rank, 0]))
        self.state = fresh_state(scheme, elements, wire)

    def compiled(self):
        """Returns a function per step, which runs this step and all earlier ones."""
        functions = (self.scatter, self.select, self.gather, self.everything)
        label = f"steps.{self.scheme.density}".replace("0.", "0_")
        return [
            tf.function(f, autograph=False).get_concrete_function(f"{label}.{f.__name__}")
            for f in functions
        ]

    def scatter(self, name):
        """Sums the vector in the node, and returns this rank's shard."""
        return stages.scatter_sum(
            self.vector.read_value(), self.node, self.wire, f"{name}.scatter", None
        )

    def select(self, name):
        """Selects from the summed shard, with error feedback."""
        residual, shard, scheme = self.state[1].read_value(), self.scatter(name), self.scheme
        values, indices, residual = tp.ops.error_feedback_top_k(
            residual, shard, self.count, scheme.select, wire_dtype=scheme.wire_dtype
        )
        self.state[1].assign(residual)
        return values, indices

    def gather(self, name):
        """Gathers the selected elements of ranks with the same index from all nodes."""
        packed = pack_pairs(*self.select(name), self.scheme.wire_dtype)
        return self.wire.all_gather(packed, self.wire.topology.across, f"{name}.across")

    def everything(self, name):
        """Runs the complete exchange of the scheme."""
        return exchanged(self.scheme, self.vector, self.state, self.wire, name)


def measured(scheme, elements, wire):
    """Returns the seconds that each step adds on the slowest rank."""
    compiled = Prefixes(scheme, elements, wire).compiled()
    turns = [[slowest(wire, call) for call in compiled] for _ in range(REPEATS + 2)][2:]
    until = [statistics.median(seconds) for seconds in zip(*turns, strict=True)]
    steps = [b - a for a, b in zip([0.0, *until[:-1]], until, strict=True)]
    return {"steps_s": steps, "step_s": [turn[-1] for turn in turns]}


if __name__ == "__main__":
    main()
