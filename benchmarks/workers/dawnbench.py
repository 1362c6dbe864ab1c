"""Trains the small preset of the DAWNBench example, with our schedules or with Horovod."""

import sys
import tempfile
from pathlib import Path
from unittest import mock

import horovod.tensorflow as hvd
import tensorflow as tf
from typing_extensions import override

import tfposeidon as tp
from benchmarks.harness import ROOT
from benchmarks.workers.task import Task
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects

HOROVOD = "horovod"


class Horovod(tp.DistributedOptimizer):
    """Optimizer that calls Horovod once per gradient, without tfposeidon."""

    @override
    def apply(self, grads, trainable_variables=None, sample_count=None):
        variables = (
            self._trainable_variables if trainable_variables is None else trainable_variables
        )
        if not self.built:
            self.build(variables)
        means = [
            hvd.allreduce(gradient, name=f"gradient{index}", op=hvd.Average)
            for index, gradient in enumerate(grads)
        ]
        self.inner_optimizer.apply(means, variables)


def arguments(task, system, out):
    """Returns the command line of the example.

    Args:
      task: The request.
      system: A schedule of the example, or "horovod".
      out: Folder of the run.
    """
    schedule = "allreduce" if system == HOROVOD else system
    found = ["--preset", "tiny", "--data", task.data, "--out", str(out), "--seed", str(task.seed)]
    found += ["--schedule", schedule, "--memory", str(out / "memory"), "--without", *task.without]
    return found + (["--shortest"] if task.shortest else [])


def main():
    task = Task.from_argument()
    sys.path.insert(0, str(ROOT / "examples"))
    import dawnbench_resnet50 as example

    tf.config.threading.set_inter_op_parallelism_threads(4)
    tp.init()
    for system in task.systems:
        with tempfile.TemporaryDirectory() as own:
            out = Path(exchange_objects(own, runtime.wire(), "bench.folder")[0])
            options = example.parse_arguments(arguments(task, system, out))
            wrapper = Horovod if system == HOROVOD else tp.DistributedOptimizer
            with mock.patch.object(tp, "DistributedOptimizer", wrapper):
                model, kept = example.run(options)
            # Rank 0 removes the folder once the other ranks no longer read it.
            tp.barrier()
        plan = None if system == HOROVOD else str(model.optimizer.plan)
        task.note(system, {"lines": kept.lines, "target": kept.target, "plan": plan})


if __name__ == "__main__":
    main()
