"""One rank of a job of cases: `python worker.py RESULTS RANKS_PER_NODE MODULE ...`."""

import importlib
import json
import os
import sys
import time
import traceback

import keras

import tfposeidon as tp
from tfposeidon import runtime
from tfposeidon.wire import exchange_objects


def cases(modules):
    """Name -> function of every case in `modules`."""
    found = {}
    for module in modules:
        loaded = importlib.import_module(f"tests.on_ranks.{module}")
        for name, value in vars(loaded).items():
            if name.startswith("case_"):
                found[f"{module}.{name.removeprefix('case_')}"] = value
    return found


def run(case, wire):
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    keras.config.set_dtype_policy("float32")
    try:
        case(wire)
    except Exception:
        return traceback.format_exc()
    return None


def main(results_path, ranks_per_node, *modules):
    layout = int(ranks_per_node) or None
    tp.init(ranks_per_node=layout, stall_timeout_s=60)
    wire = runtime.wire()
    results = {}
    for name, case in cases(modules).items():
        begin = time.perf_counter()
        problem = run(case, wire)
        problems = exchange_objects(problem, wire, f"case/{name}")
        text = "\n".join(f"rank {rank}: {p}" for rank, p in enumerate(problems) if p)
        results[name] = text
        if wire.topology.rank == 0:
            print(f"{'FAIL' if text else 'ok'} {name} {time.perf_counter() - begin:.1f} s", flush=True)
            with open(results_path + ".part", "w") as stream:
                json.dump(results, stream)
            os.replace(results_path + ".part", results_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
