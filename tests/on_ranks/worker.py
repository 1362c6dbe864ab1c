"""One rank of a job of cases: `python worker.py RESULTS RANKS_PER_NODE MODULE ...`."""

import gc
import importlib
import json
import os
import sys
import time
import traceback

import keras

import tfposeidon as tp
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects

STALL_LIMIT_S = 180
"""For ranks that hang: one that is only slow may be that late on a busy machine."""


def cases(modules):
    """Name -> function of every case in `modules`."""
    found = {}
    for module in modules:
        loaded = importlib.import_module(f"tests.on_ranks.{module}")
        for name, value in vars(loaded).items():
            if name.startswith("case_"):
                found[f"{module}.{name.removeprefix('case_')}"] = value
    return found


def server_of(modules):
    """Rank that the modules ask for as a server; `None` for none."""
    loaded = [importlib.import_module(f"tests.on_ranks.{module}") for module in modules]
    return next((module.SERVER for module in loaded if hasattr(module, "SERVER")), None)


def run(case, wire):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    keras.config.set_dtype_policy("float32")
    try:
        case(wire)
    except Exception:
        return traceback.format_exc()
    return None


def main(results_path, ranks_per_node, *modules):
    layout = int(ranks_per_node) or None
    # Cases that are not about `auto` exchange by what they name, or by all-reduce.
    tp.init(
        ranks_per_node=layout,
        stall_timeout_s=STALL_LIMIT_S,
        links="unknown",
        server_rank=server_of(modules),
    )
    wire = runtime.wire()
    results = {}
    # Objects made by imports live as long as the rank: no collection needs to look at them.
    # Collections are not too rare: to free the graphs of several cases at once took a minute.
    gc.freeze()
    gc.set_threshold(5_000, 10, 10)
    for name, case in cases(modules).items():
        begin = time.perf_counter()
        problem = run(case, wire)
        problems = exchange_objects(problem, wire, f"case/{name}")
        text = "\n".join(f"rank {rank}: {p}" for rank, p in enumerate(problems) if p)
        results[name] = {"problem": text, "seconds": round(time.perf_counter() - begin, 2)}
        if wire.topology.rank == 0:
            print(f"{'FAIL' if text else 'ok'} {name} {results[name]['seconds']} s", flush=True)
            with open(results_path + ".part", "w") as stream:
                json.dump(results, stream)
            os.replace(results_path + ".part", results_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
