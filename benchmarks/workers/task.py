"""The request and the answer of all workers.

The request is JSON in the argument, and rank 0 writes the answer as JSON to a file.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

from benchmarks import architectures
from tfposeidon.lab import network
from tfposeidon.lab.network import payload_bytes


class Task:
    """Request of a job, and its answer so far.

    Args:
      text: JSON object with the attributes below.

    Attributes:
      model: Name in `benchmarks.architectures`.
      shrink: Factor by which the model is made smaller.
      dilation: Factor on compute times.
      systems: Systems to measure in this job, one after the other.
      warm_up: Number of steps that are not timed.
      steps: Number of steps that are timed.
      result: Path of the answer.
    """

    def __init__(self, text):
        self.options = json.loads(text)
        self.rank, self.size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
        self.answer = {}

    @classmethod
    def from_argument(cls):
        """Returns the task of the command line."""
        return cls(sys.argv[1])

    def __getattr__(self, name):
        try:
            return self.options[name]
        except KeyError:
            raise AttributeError(name) from None

    def emulated(self):
        """Returns the model to train, in the requested size."""
        return architectures.model(self.model).shrunk(self.shrink)

    def address(self, rank):
        """Returns host and port at which a rank of another framework listens.

        Ports are below the range from which operating systems assign ports.

        Args:
          rank: Rank that listens.
        """
        store = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "")
        if store.startswith(network.SWITCH_ADDRESS):
            host = network.address(rank // int(os.environ["HOROVOD_LOCAL_SIZE"]))
        else:
            host = "127.0.0.1"
        # The port depends on that of the launcher, which differs between concurrent jobs.
        rendezvous = int(os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", 0))
        return f"{host}:{10_000 + rendezvous % 20_000 + rank}"

    def measure(self, system, step, everybody):
        """Times a step, and stores the answer.

        Args:
          system: Name of what is measured.
          step: Function that runs one step.
          everybody: Function that maps this rank's seconds to the list of all ranks' seconds, and
            synchronizes the ranks.
        """
        for _ in range(self.warm_up):
            step()
        # Count bytes only after all ranks have warmed up.
        everybody(0.0)
        sent = payload_bytes()
        times = []
        for _ in range(self.steps):
            begin = time.perf_counter()
            step()
            times.append(everybody(time.perf_counter() - begin))
        self.note_times(system, times, payload_bytes() - sent)

    def note_times(self, system, times, sent_bytes, **more):
        """Stores the times of all steps, and the bytes that the node sent.

        Args:
          system: Name of what was measured.
          times: Seconds of each step on each rank.
          sent_bytes: Bytes that the node sent in all steps.
          **more: Further measurements.
        """
        slowest = [max(step) for step in times]
        self.note(
            system,
            {"step_s": slowest, "ranks_s": times, "sent_bytes": sent_bytes / len(times)} | more,
        )

    def note(self, system, answer):
        """Adds measurements to the answer, and replaces its file atomically.

        Args:
          system: Name of what was measured.
          answer: Measurements of the system.
        """
        self.answer[system] = answer
        if self.rank == 0:
            print(f"{system:24} {summary(answer)}", flush=True)
            path = Path(self.result)
            beside = path.with_suffix(".part")
            beside.write_text(json.dumps(self.answer))
            beside.replace(path)


def summary(answer):
    """Returns an answer as one line for progress output."""
    if "error" in answer:
        return answer["error"].strip().splitlines()[-1]
    if "step_s" in answer:
        return f"{1e3 * statistics.median(answer['step_s']):10.1f} ms"
    return ", ".join(
        f"{name} {value}" for name, value in answer.items() if not isinstance(value, list)
    )
