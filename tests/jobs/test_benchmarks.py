"""The smallest case of every benchmark runs and is plotted; test_peers.py runs other frameworks."""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from tests.launch import LIMIT_S, ROOT, WITH_SKLEARN, ahead, finish, start

NOT_MEASURED = {
    "__init__",
    "architectures",
    "best_scheme",
    "exchanges",
    "gpu_check",  # in test_gpu_check.py
    "grid",
    "predict",
    "predict_steps",
    "figures",
    "harness",
    "redraw",
    "structure",
} | ({"gpu"} if shutil.which("nvidia-smi") is None else set())
SAME_JOB = {"scaling": ["auto", "overview"]}
"""Benchmark -> other benchmarks with the same smallest job."""
OTHERS = NOT_MEASURED.union(*SAME_JOB.values())
NAMES = sorted({file.stem for file in (ROOT / "benchmarks").glob("*.py")} - OTHERS)
"""All modules, so that new benchmarks are included."""
OF_DIGITS = {"accuracy", "elastic_averaging", "large_batch", "local_accuracy", "selection"}


def smallest(name):
    """Returns the processes of all benchmarks with this job, and the results."""
    with tempfile.TemporaryDirectory() as folder:
        path, found = Path(folder) / "results.json", []
        for module in (name, *SAME_JOB.get(name, [])):
            command = [sys.executable, "-m", f"benchmarks.{module}", "--smallest"]
            variables = WITH_SKLEARN if module in OF_DIGITS else {}
            found.append(finish(start([*command, "--results", str(path)], variables), LIMIT_S))
        return found, json.loads(path.read_text()) if path.exists() else {}


@ahead(smallest)
@pytest.mark.parametrize("name", NAMES)
def test_the_smallest_case_has_results_and_a_plot(name, outcome):
    done, results = outcome
    for one in done:
        assert one.returncode == 0, one.stdout[-4000:]
    for other in done[1:]:
        assert "1 of 1 jobs are in" in other.stdout, other.stdout[-4000:]
    assert results
    for key, answer in results.items():
        for system, figures in answer.get("systems", {}).items():
            assert "error" not in figures, f"{key}, {system}: {figures['error']}"
