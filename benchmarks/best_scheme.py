"""Prints the choices of BestScheme (Poseidon, Algorithm 1) for the papers' models.

    python -m benchmarks.best_scheme
    python -m benchmarks.best_scheme --models vgg19 --workers 8 --batch 32 64 128

The choice for each fully connected layer follows from byte counts; nothing is trained.
"""

import argparse

from benchmarks import architectures, harness
from tfposeidon.communication.topology import Topology
from tfposeidon.factors.pairs import FactorShape
from tfposeidon.gradients import Description
from tfposeidon.policies import HybComm

# Batch sizes in Poseidon, section 1 and Table 3.
BATCHES = {"alexnet": 256, "googlenet": 128, "inception_v3": 32, "vgg19": 32, "vgg19_22k": 32}
WORKERS = (2, 4, 8, 16, 32)


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models",
        nargs="*",
        default=list(BATCHES),
        help=f"names in benchmarks.architectures ({', '.join(BATCHES)})",
    )
    parser.add_argument(
        "--workers",
        nargs="*",
        type=int,
        default=WORKERS,
        help="numbers of nodes, each worker and server (2 to 32)",
    )
    parser.add_argument("--batch", nargs="*", type=int, help="samples per worker (as in Poseidon)")
    return parser.parse_args()


def rows_of(model, batch, workers):
    """Yields a row per fully connected layer: choice and ratio of bytes, by number of workers."""
    for layer in model.layers:
        if not layer.rows:
            continue
        m, n = layer.kernel
        factors = FactorShape(batch * layer.rows, m, n, "float32")
        description = Description(f"{layer.name}/kernel", layer.kernel, "float32", factors)
        choices = [HybComm().choose(description, Topology.regular(0, p, 1)) for p in workers]
        yield (model.name, str(batch), layer.name, f"{m} x {n}", *map(cell, choices))


def cell(choice):
    """Returns the chosen scheme, and the ratio of bytes by parameter server to bytes by factors."""
    sizes = dict(choice.candidates)
    return f"{choice.scheme.name} ({sizes['ps'] / sizes['factors']:.2g})"


def main():
    options = parse_arguments()
    print("in brackets: bytes of parameter server / bytes of sufficient factors, per node and step")
    table = [("model", "batch", "layer", "kernel", *(f"{p} workers" for p in options.workers))]
    for name in options.models:
        model = architectures.model(name)
        for batch in options.batch or [BATCHES.get(name, model.batch)]:
            table += rows_of(model, batch, options.workers)
    harness.show(table)


if __name__ == "__main__":
    main()
