"""The same cases under mpirun, where Horovod was built with HOROVOD_WITH_MPI=1."""

import json
import os
import shutil
import subprocess
import sys

import horovod.tensorflow as hvd
import pytest

from tests.launch import LIMIT_S, ROOT
from tests.on_ranks.worker import cases

MODULES = ("contract_table", "layout")

pytestmark = pytest.mark.skipif(
    not (hvd.mpi_built() and shutil.which("mpirun")),
    reason="Horovod was built without MPI, or there is no mpirun",
)


def test_schemes_over_mpi(tmp_path):
    launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "4", sys.executable]
    worker = ["tests/on_ranks/worker.py", str(tmp_path / "results.json"), "2", *MODULES]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        [*launcher, *worker],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results) == list(cases(MODULES))
    assert not any(case["problem"] for case in results.values()), results
