"""Checks TensorFlow, Horovod and tfposeidon on a GPU: bitwise correctness, and speed.

    python -m benchmarks.gpu_check libs see ops times one check speed
    horovodrun -np 2 python -m benchmarks.gpu_check two links    # ranks may share one GPU
    horovodrun -np 2 python -m benchmarks.gpu_check nccl         # each rank with its own GPU

Each check prints a line, `ok` or `FAIL`, with seconds and results; a failure does not end a stage.
The exit status is 1 if a check failed, and 3 if TensorFlow finds no GPU. Without a GPU the same
code runs on the CPU. Environment variables: RESULTS names a file to which lines are also appended;
FEW=1 omits most of `two`; MODELS and POLICIES select the models and policies that `speed` times.
"""

import argparse
import importlib
import os
import sys

# Stage -> its module. Modules are imported late: `libs` runs before TensorFlow is loaded.
STAGES = {
    "libs": "device",
    "see": "device",
    "ops": "native_ops",
    "times": "native_ops",
    "one": "training",
    "two": "training",
    "links": "network",
    "check": "network",
    "nccl": "network",
    "speed": "speed",
}
TOGETHER = {
    "two": {"network": "unknown"},
    "links": {"network": "measure"},
    "nccl": {"network": "unknown"},
}
"""Stages that all ranks of a job run together, with their arguments of `tp.init()`."""


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "stages", nargs="+", choices=STAGES, metavar="STAGE", help=", ".join(STAGES)
    )
    small = bool(os.environ.get("SMALL"))
    parser.add_argument(
        "--small", action="store_true", default=small, help="use small sizes, for CPUs"
    )
    budget_s = float(os.environ.get("BUDGET_S", "inf"))
    parser.add_argument(
        "--budget-s", type=float, default=budget_s, help="seconds after which no check starts"
    )
    options = parser.parse_args()
    failures = [run(stage, options.small, options.budget_s) for stage in options.stages]
    return int(any(failures))


def run(stage, small, budget_s):
    """Runs a stage, and returns whether a check failed."""
    from benchmarks.gpu_stages.checks import Checks

    module = importlib.import_module(f"benchmarks.gpu_stages.{STAGES[stage]}")
    checks = Checks(stage, small, budget_s)
    if stage in TOGETHER:
        from benchmarks.gpu_stages import training

        training.begin(**TOGETHER[stage])
        checks.gather = training.gathered
    getattr(module, stage)(checks)
    return checks.failures > 0


if __name__ == "__main__":
    sys.exit(main())
