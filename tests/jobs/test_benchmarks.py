"""Every benchmark runs its smallest case to the end, installed peers included, and plots it."""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from tests.launch import LIMIT_S, ROOT, WITH_SKLEARN, ahead, finish, start

NOT_MEASURED = {
    "__init__",
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
NAMES = sorted({file.stem for file in (ROOT / "benchmarks").glob("*.py")} - NOT_MEASURED)
"""All modules, so that none can be missed."""
OF_DIGITS = {"accuracy", "elastic_averaging", "large_batch", "local_accuracy", "selection"}


def smallest(name):
    """What the benchmark said, how it ended, and its results."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", "--smallest", "--results", path]
        variables = WITH_SKLEARN if name in OF_DIGITS else {}
        done = finish(start(list(map(str, command)), variables), LIMIT_S)
        return done, json.loads(path.read_text()) if path.exists() else {}


@ahead(smallest)
@pytest.mark.parametrize("name", NAMES)
def test_smallest_case(name, outcome):
    done, results = outcome
    assert done.returncode == 0, done.stdout[-4000:]
    assert results
    for key, answer in results.items():
        for system, figures in answer.get("systems", {}).items():
            assert "error" not in figures, f"{key}, {system}: {figures['error']}"
