"""The package trains without its optional packages (edges)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EDGES = ("local", "elastic_averaging", "sharded", "factors", "autotune")
README = "tests/test_readme.py::test_the_example_runs"
CORE = ("tests/test_optimizer.py", "tests/optimizers/test_accumulating.py")
"""Tests of the core on one rank."""
COPY = """
import tfposeidon

def test_the_copy_is_imported():
    assert tfposeidon.__file__.startswith({folder!r})
"""
WITHOUT_AUTOTUNE = """
from tfposeidon import policies
from tfposeidon.communication.topology import Topology
from tfposeidon.gradients import Description
from tfposeidon.exchange.plan import make_plan

def test_auto_is_all_reduce():
    layers = [Description("dense/kernel", (20, 3), "float32")]
    for scheme in ("auto", [(".", "auto")]):
        plan = make_plan(layers, policies.parse(scheme), Topology.regular(0, 4, 2))
        assert [bucket.scheme.name for bucket in plan.buckets] == ["allreduce"]
        assert "auto: tfposeidon.autotune is not installed" in str(plan)
"""

ONLY_COPY = """
import sys

# An editable installation would find the folders that the copy lacks.
sys.meta_path[:] = [one for one in sys.meta_path if "Editable" not in getattr(one, "__name__", "")]
"""


def _run(folder, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "fast", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize("without", [EDGES, *((edge,) for edge in EDGES)], ids=" ".join)
def test_the_core_runs_without_optional_packages(without, tmp_path):
    """All edges are deleted from a copy at once, and then each edge alone."""
    # Copy the folders, because pytest would follow links and import the original modules.
    for name in ("tfposeidon", "keras_callbacks", "datacache", "tests", "docs"):
        left_out = without if name == "tfposeidon" else ()
        ignored = shutil.ignore_patterns("__pycache__", *left_out)
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path)
    copy = COPY.format(folder=str(tmp_path)) + (WITHOUT_AUTOTUNE if "autotune" in without else "")
    (tmp_path / "tests" / "test_copy.py").write_text(copy)
    (tmp_path / "sitecustomize.py").write_text(ONLY_COPY)
    more = CORE if without == EDGES else ()
    done = _run(tmp_path, "tests/test_copy.py", README, *more)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout or "100%" in done.stdout, done.stdout
