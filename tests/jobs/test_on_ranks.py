"""Starts one job per world, and shows every case that ran in it as a test."""

import functools
import json
import sys
import tempfile
from pathlib import Path

import pytest

from tests.launch import ROOT, horovodrun, lab
from tests.on_ranks.worker import cases

WORLDS = {
    # name: ranks, or options of the lab; ranks per node (0: as the launcher says); modules
    "1": (1, 0, ["contract_table"]),
    "2": (
        2,
        0,
        [
            "contract_table",
            "losses",
            "optimizer_features",
            "refusals",
            "memory",
            "public_collectives",
        ],
    ),
    "2 with a timeline": (2, 0, ["wait_free"]),
    "2 for callbacks": (
        2,
        0,
        [
            "callbacks",
            "checkpoints",
            "several_optimizers",
            "layer_state",
            "presence",
            "stateful",
            "local_updates",
            "local_callbacks",
            "local_state",
        ],
    ),
    "2x1 for models": (
        2,
        1,
        [
            "hub",
            "applications",
            "local_models",
            "layers",
            "factor_accumulation",
            "automatic",
            "automatic_models",
            "plan_changes",
            "phases",
        ],
    ),
    "3": (3, 0, ["contract_table", "uneven"]),
    "3 with a server": (
        3,
        0,
        ["elastic_averaging", "elastic_averaging_models", "asynchronous_callbacks"],
    ),
    "2 with a server": (2, 0, ["elastic_averaging_elsewhere"]),
    "3 with another server": (3, 0, ["elastic_averaging_elsewhere"]),
    "2+1": (3, 2, ["contract_table", "caching", "local_nodes"]),
    "2x2": (4, 2, ["contract_table", "training", "layout", "sparse", "caching"]),
    "2x2 for servers": (
        4,
        2,
        ["factors", "server_update", "parallel_operator", "layer_rates", "local_nodes"],
    ),
    "3x2": (6, 2, ["contract_table"]),
    "2x2 in the lab": (
        "--nodes 2 --per-node 2 --inter 200mbit",
        0,
        ["links", "feeding", "local_bytes"],
    ),
}
"""Schemes run on every layout; every other case runs on the smallest layout that shows it."""


@functools.cache
def results(world):
    """Runs the world's job once; what each case said, and the job's output."""
    ranks, ranks_per_node, modules = WORLDS[world]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        script = ROOT / "tests" / "on_ranks" / "worker.py"
        worker = (script, path, ranks_per_node, *modules)
        in_lab = isinstance(ranks, str)
        launch = (
            functools.partial(lab, ranks, sys.executable)
            if in_lab
            else functools.partial(horovodrun, ranks)
        )
        done = launch(*worker, environment=_environment(modules))
        problems = json.loads(path.read_text()) if path.exists() else {}
    return problems, done


def _environment(modules):
    """Returns Horovod's settings for a job; docs/environment.md says what each costs."""
    return (
        {"HOROVOD_TIMELINE": "DYNAMIC"} if "wait_free" in modules else {"HOROVOD_CYCLE_TIME": "5"}
    )


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        metafunc.parametrize(
            ("world", "case"), [(w, c) for w in WORLDS for c in cases(WORLDS[w][2])]
        )


def test_on_ranks(world, case, record_property):
    problems, done = results(world)
    assert case in problems, f"the job ended before this case did:\n{done.stdout[-6000:]}"
    record_property("seconds", problems[case]["seconds"])
    assert not problems[case]["problem"], problems[case]["problem"]


@pytest.mark.parametrize("world", WORLDS)
def test_the_job_ends_in_good_order(world):
    assert results(world)[1].returncode == 0, results(world)[1].stdout[-6000:]
