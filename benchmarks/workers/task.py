"""What a worker is asked to do, and how it answers: JSON in its argument, JSON in a file of rank 0."""

import json
import os
import statistics
import sys
import time
from pathlib import Path

from tfposeidon.lab import models, network
from tfposeidon.lab.network import payload_bytes


class Task:
    """One job's request.

    Attributes (from JSON):
      model: Name in `tfposeidon.lab.models`; `shrink`: factor by which it is made smaller.
      dilation: Factor on compute times.
      systems: What to measure, in turn, in this job.
      warm_up, steps: Steps that are not, and that are, timed.
      result: Path of the answer.
    """

    def __init__(self, text):
        self.options = json.loads(text)
        self.rank, self.size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
        self.answer = {}

    @classmethod
    def from_argument(cls):
        return cls(sys.argv[1])

    def __getattr__(self, name):
        try:
            return self.options[name]
        except KeyError:
            raise AttributeError(name) from None

    def emulated(self):
        """The model to train, in the size that was asked for."""
        return models.model(self.model).shrunk(self.shrink)

    def address(self, rank):
        """Host and port for a rank of a peer to listen at; ports lie below those that systems give out themselves."""
        in_lab = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR") == network.SWITCH_ADDRESS
        host = (
            network.address(rank // int(os.environ["HOROVOD_LOCAL_SIZE"]))
            if in_lab
            else "127.0.0.1"
        )
        return f"{host}:{10_000 + int(os.environ.get('HOROVOD_GLOO_RENDEZVOUS_PORT', 0)) % 20_000 + rank}"

    def measure(self, system, step, everybody):
        """Times `step()` and notes the answer for `system`.

        Args:
          everybody: From this rank's seconds to a list of each rank's; it also lets all ranks begin together.
        """
        for _ in range(self.warm_up):
            step()
        everybody(0.0)
        sent = payload_bytes()
        times = []
        for _ in range(self.steps):
            begin = time.perf_counter()
            step()
            times.append(everybody(time.perf_counter() - begin))
        self.note_times(system, times, payload_bytes() - sent)

    def note_times(self, system, times, sent_bytes, **more):
        """Notes each step's seconds on each rank, the slowest rank's apart, and what the node sent in all of them."""
        slowest = [max(step) for step in times]
        self.note(
            system,
            {"step_s": slowest, "ranks_s": times, "sent_bytes": sent_bytes / len(times)} | more,
        )

    def note(self, system, answer):
        """Adds to the answer, and writes it beside and renames it."""
        self.answer[system] = answer
        if self.rank == 0:
            print(f"{system:24} {summary(answer)}", flush=True)
            path = Path(self.result)
            beside = path.with_suffix(".part")
            beside.write_text(json.dumps(self.answer))
            beside.replace(path)


def summary(answer):
    """One line for people who watch."""
    if "error" in answer:
        return answer["error"].strip().splitlines()[-1]
    if "step_s" in answer:
        return f"{1e3 * statistics.median(answer['step_s']):10.1f} ms"
    return ", ".join(
        f"{name} {value}" for name, value in answer.items() if not isinstance(value, list)
    )
