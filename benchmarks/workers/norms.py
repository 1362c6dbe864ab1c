"""Times the norms of all layers: on one rank, a share, the all-gather, and on all ranks."""

import tensorflow as tf

import tfposeidon as tp
from benchmarks.norms import drawn
from benchmarks.workers.exchange import slowest
from benchmarks.workers.task import Task
from tfposeidon.communication import runtime
from tfposeidon.communication.topology import balanced_parts
from tfposeidon.exchange import parallel_operator
from tfposeidon.exchange.parallel_operator import gather_results
from tfposeidon.optimizers.layer_wise import local_norms


def main():
    task = Task.from_argument()
    topology = tp.init()
    wire = runtime.wire()
    variables = drawn(task.model)
    shares = balanced_parts(
        [variable.shape.num_elements() for variable in variables], topology.size
    )
    sums = [sum(v.shape.num_elements() for v in variables[begin:end]) for begin, end in shares]
    largest = variables[slice(*shares[sums.index(max(sums))])]
    mine = variables[slice(*shares[topology.rank])]
    own = tf.Variable(tf.ones([len(mine), 2]))
    in_parallel = parallel_operator.parallel_norms(wire, "bench.parallel")
    everybody = range(topology.size)
    for system, ranks, step in (
        ("local", [0], lambda: local_norms(variables, twice(variables))),
        ("share", [0], lambda: local_norms(largest, twice(largest))),
        (
            "all-gather",
            everybody,
            lambda: gather_results(own.read_value(), "float32", [2], wire, "bench.all_gather"),
        ),
        ("all local", everybody, lambda: local_norms(variables, twice(variables))),
        ("all in parallel", everybody, lambda: in_parallel(variables, twice(variables))),
    ):
        compiled = tf.function(step, autograph=False)
        times = [
            # All ranks call `slowest`, which exchanges times; idle ranks pass an empty function.
            slowest(wire, compiled if topology.rank in ranks else lambda: None)
            for _ in range(task.rounds + 3)
        ]
        task.note(system, {"step_s": times[3:]})


def twice(variables):
    """Returns each variable's value twice: for itself, and for its gradient."""
    return [[tf.convert_to_tensor(variable)] * 2 for variable in variables]


if __name__ == "__main__":
    main()
