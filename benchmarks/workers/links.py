"""Measures the network profile repeatedly, as a job does before its first step.

Systems: "quiet" (no other load), and "loaded" (a process on rank 0's node keeps one core busy).
"""

import contextlib
import json
import subprocess
import sys
import time

import tfposeidon as tp
from benchmarks.workers.task import Task
from tfposeidon.autotune import measurement
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects


@contextlib.contextmanager
def busy_core():
    """Keeps one core busy within this context."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main():
    task = Task.from_argument()
    topology = tp.init()
    wire = runtime.wire()
    for system in task.systems:
        is_loaded = system == "loaded" and topology.rank == 0
        with busy_core() if is_loaded else contextlib.nullcontext():
            links, took_s = [], []
            for _ in range(task.repeats):
                exchange_objects(None, wire, "bench.begin")
                begin_s = time.perf_counter()
                found = measurement.measure(wire)
                took_s.append(max(exchange_objects(time.perf_counter() - begin_s, wire, "bench")))
                links.append(json.loads(found.to_json()))
        task.note(system, {"links": links, "step_s": took_s})


if __name__ == "__main__":
    main()
