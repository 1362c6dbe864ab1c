"""Compiles GPU kernels with nvcc, if it is installed, and registers them.

tests/native/gpu_test.cc tests their results, with the same passes on the CPU, because only a
machine with a GPU can run the kernels.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.launch import ROOT, ahead, finish, start

NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
CUDA = Path(os.environ.get("HOROVOD_CUDA_HOME", "/usr/local/cuda")) / "include"

# Prints which kernels exist for which devices, and which inputs they read on the host. It runs in a
# separate process, because an op can be registered only once.
REGISTERED = """
import json, sys
import tensorflow as tf
from pathlib import Path
from tensorflow.python.framework import kernels
from tfposeidon import native
native.LIBRARY = Path(sys.argv[1])
native.library()
found = {}
for op in sys.argv[2:]:
    for kernel in kernels.get_registered_kernels_for_op(op).kernel:
        found.setdefault(op, []).append([kernel.device_type, sorted(kernel.host_memory_arg)])
print(json.dumps([native.has_gpu_kernels(), found]))
"""
ON_HOST = {
    "TfposeidonTopK": ["k", "seed"],
    "TfposeidonErrorFeedbackTopK": ["k", "seed"],
    "TfposeidonMomentumCorrectionTopK": ["k", "seed"],
    "TfposeidonScatterAdd": ["counts", "size"],
    "TfposeidonEncode": [],
    "TfposeidonSumRows": [],
    "TfposeidonL2Norms": [],
}
ONE_TYPE = {"TfposeidonL2Norms"}


def compiled():
    """Returns the kernels of a library for one architecture; others would take as long each."""
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "setup.py", "-q", "build_ext", "--cuda", "--gpus", "90"]
        done = finish(
            start([*build, "--build-lib", f"{folder}/lib", "--build-temp", f"{folder}/temp"])
        )
        assert done.returncode == 0, done.stdout
        library = f"{folder}/lib/tfposeidon/native/_ops.so"
        done = finish(start([sys.executable, "-c", REGISTERED, library, *ON_HOST]))
        assert done.returncode == 0, done.stdout
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(NVCC is None, reason="requires nvcc")
@ahead(compiled)
def test_gpu_kernels_compile_and_register_on_a_tensorflow_without_gpus(outcome):
    has_gpu_kernels, found = outcome
    assert has_gpu_kernels
    for op, on_host in ON_HOST.items():
        # Most ops have kernels for two dtypes of indices or of values on each device.
        assert sorted(found[op]) == sorted(
            [["CPU", []], ["GPU", on_host]] * (1 if op in ONE_TYPE else 2)
        ), op


@pytest.mark.skipif(not CUDA.exists(), reason="requires the headers of CUDA")
@pytest.mark.parametrize("source", ["tests/native/gpu_test.cc", "benchmarks/native/gpu.cc"])
def test_programs_that_need_a_gpu_compile(source):
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-fsyntax-only"]
    command = ["g++", *flags, "-DTFPOSEIDON_ON_GPU", "-I.", "-isystem", CUDA, source]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)


def test_querying_gpu_kernels_first_preserves_all_ops():
    code = (
        "from tfposeidon import native, ops; native.has_gpu_kernels(); "
        "print(ops.top_k([1.0, 2.0], 1)[1].numpy())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip().endswith("[1]")
