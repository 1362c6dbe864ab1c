"""What the wrapper costs: its exchange beside Horovod's own, and one rank beside plain Keras.

    horovodrun -np 2 python -m benchmarks.wrapper          # exchange of ResNet-50's gradients
    python -m benchmarks.wrapper                           # one rank: the train step

Pairs are timed in turn (A B A B ...), each pair gives a ratio, and the median of the ratios counts.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import tfposeidon as tp
from benchmarks.harness import machine
from tfposeidon import coordinator, policies, runtime
from tfposeidon.exchanger import Exchanger
from tfposeidon.gradient import describe
from tfposeidon.lab import models
from tfposeidon.wire import exchange_objects


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15, help="pairs that are timed")
    parser.add_argument(
        "--bucket-mib",
        type=float,
        nargs="*",
        default=[coordinator.DEFAULT_BUCKET_BYTES / 2**20],
        help="bucket sizes to try",
    )
    parser.add_argument("--schemes", nargs="*", default=["allreduce", "asa", "asa16", "2dtar"])
    parser.add_argument("--report", metavar="FILE", help="also write the figures as JSON")
    return parser.parse_args()


def timed(function):
    """Seconds of the slowest rank."""
    wire = runtime.wire()
    exchange_objects(None, wire, "bench.start")
    begin = time.perf_counter()
    function()
    return max(exchange_objects(time.perf_counter() - begin, wire, "bench.stop"))


def ratios(ours, theirs, pairs):
    """Times both in turn; returns the seconds of each and the ratio of each pair."""
    for function in (ours, theirs, ours, theirs):
        function()
    times = [
        (timed(ours), timed(theirs)) if i % 2 else tuple(reversed((timed(theirs), timed(ours)))) for i in range(pairs)
    ]
    return [a for a, _ in times], [b for _, b in times], [a / b for a, b in times]


def summary(name, ours, theirs, quotients):
    return {
        "what": name,
        "ours_ms": 1e3 * statistics.median(ours),
        "theirs_ms": 1e3 * statistics.median(theirs),
        "ratio": statistics.median(quotients),
        "quartiles": [float(q) for q in np.quantile(quotients, [0.25, 0.75])],
    }


def exchange_benchmark(options):
    """Our exchange against `grouped_allreduce` on the same variables."""
    variables = [tf.Variable(tf.random.normal(shape, stddev=1e-3), name=f"g{i}") for i, shape in enumerate(shapes())]
    horovods = tf.function(lambda: [tf.reduce_max(t) for t in _grouped(variables)])
    for scheme in options.schemes:
        for bucket_mib in options.bucket_mib:
            ours = _ours(variables, scheme, int(bucket_mib * 2**20))
            yield summary(f"{scheme}, buckets of {bucket_mib:g} MiB", *ratios(ours, horovods, options.pairs))


def shapes():
    """Of ResNet-50's 161 variables, in the order of the forward pass."""
    layers = models.model("resnet50").layers
    return [shape for layer in layers for shape in (layer.kernel, *((length,) for length in layer.vectors))]


def _grouped(variables):
    return hvd.grouped_allreduce([v.read_value() for v in variables], op=hvd.Average, name="grouped")


def _ours(variables, scheme, bucket_bytes):
    wire = runtime.wire()
    descriptions = [describe(v) for v in variables]
    plan = coordinator.plan(descriptions, policies.parse(scheme), wire.topology, bucket_bytes)
    exchanger = Exchanger(plan, wire, None)
    gradients = [v.read_value() for v in variables]
    exchanger.agree(f"bench_{scheme}_{bucket_bytes}", gradients, {})
    return tf.function(
        lambda: [tf.reduce_max(t) for t in exchanger.exchange([v.read_value() for v in variables], None)[0]]
    )


def single_rank_benchmark(options):
    """The train step of one rank, wrapped and plain."""
    x = np.random.default_rng(0).normal(size=(64, 32, 32, 3)).astype("float32")
    y = np.random.default_rng(1).integers(0, 10, 64)
    ours, theirs = _trainer(tp.DistributedOptimizer(_sgd()), x, y), _trainer(_sgd(), x, y)
    yield summary("train step on one rank, 10 steps", *ratios(ours, theirs, 4 * options.pairs))


def _sgd():
    return keras.optimizers.SGD(0.01, momentum=0.9)


def _trainer(optimizer, x, y):
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            *(layers.Conv2D(32, 3, strides=2, activation="relu") for _ in range(3)),
            layers.Flatten(),
            layers.Dense(2048, activation="relu"),
            layers.Dense(10),
        ]
    )
    model.compile(optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    data = tf.data.Dataset.from_tensors((x, y)).repeat()
    steps = iter(data)
    model.make_train_function()

    def train():
        for _ in range(10):
            model.train_function(steps)

    return train


def main():
    options = parse_arguments()
    topology = tp.init()
    benchmark = exchange_benchmark if topology.size > 1 else single_rank_benchmark
    head = {
        "topology": str(topology),
        "machine": machine()["processor"],
        "commit": machine()["commit"],
        "pairs": options.pairs,
    }
    if topology.rank == 0:
        print("\n".join(f"{key}: {value}" for key, value in head.items()), flush=True)
        print(f"{'':42} {'ours':>10} {'theirs':>10} {'ratio':>7}  quartiles", flush=True)
    rows = []
    for row in benchmark(options):
        rows.append(row)
        if topology.rank == 0:
            low, high = row["quartiles"]
            times = f"{row['ours_ms']:7.1f} ms {row['theirs_ms']:7.1f} ms"
            print(f"{row['what']:42} {times} {row['ratio']:7.3f}  {low:.3f} to {high:.3f}", flush=True)
    if options.report and topology.rank == 0:
        Path(options.report).write_text(json.dumps(head | {"rows": rows}, indent=2))


if __name__ == "__main__":
    main()
