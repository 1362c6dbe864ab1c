"""Checks TensorFlow, Horovod and tfposeidon on a GPU: correct to the bit, and how fast.

    python -m benchmarks.gpu_check libs see ops times one check speed
    horovodrun -np 2 python -m benchmarks.gpu_check two links    # ranks may share one GPU
    horovodrun -np 2 python -m benchmarks.gpu_check nccl         # each with a GPU of its own

Each check is a line, `ok` or `FAIL`, with seconds and figures; a failure does not end a stage. The
exit status is 1 if a check failed, and 3 if TensorFlow sees no GPU. Without a GPU the same code
runs on the CPU. Environment: RESULTS is a file to which the lines are added, too; FEW=1 leaves out
most of `two`; MODELS and POLICIES choose what `speed` times.
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
    parser.add_argument("--small", action="store_true", default=small, help="sizes for a CPU")
    budget_s = float(os.environ.get("BUDGET_S", "inf"))
    parser.add_argument(
        "--budget-s", type=float, default=budget_s, help="begin no check after that"
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
