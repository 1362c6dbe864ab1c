"""The GPU kernels: compiled with nvcc where it is found, and registered. What they compute is tested in
tests/native/gpu_test.cc, which runs the same passes on the processor; only a machine with a GPU can run them there."""

import json
import shutil
import subprocess
import sys

import pytest
import tensorflow as tf

from tests.launch import ROOT
from tfposeidon import coordinator, guards, native, policies
from tfposeidon.gradient import Description
from tfposeidon.topology import Topology

NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")

# Which kernels for which devices, and what they read on the host. A process of its own: an op is registered once.
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


def test_gpu_kernels_are_there_where_tensorflow_has_gpus():
    assert native.has_gpu_kernels() == (NVCC is not None and tf.test.is_built_with_cuda())


def test_asking_for_gpu_kernels_first_loses_no_op():
    code = "from tfposeidon import native, ops; native.has_gpu_kernels(); print(ops.top_k([1.0, 2.0], 1)[1].numpy())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.strip().endswith("[1]")


def test_the_plan_says_that_selection_leaves_the_gpu(monkeypatch):
    """Here with a GPU that only seems to be there."""
    variables = [Description(path="kernel", shape=(100, 100), dtype="float32")]
    for scheme, words in (
        ("hitopk", "hitopk: what is sent is made on the processor, as tfposeidon was built without nvcc"),
        ("allreduce", ""),
    ):
        plan = coordinator.plan(variables, policies.parse(scheme), Topology.regular(0, 4, 2), 1 << 20)
        assert guards.processor_advice(plan) == ""
        with monkeypatch.context() as patch:
            patch.setattr(tf.config, "list_physical_devices", lambda kind: ["GPU:0"])
            assert guards.processor_advice(plan)[: len(words) or None] == words


@pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
def test_gpu_kernels_compile_and_register_on_a_tensorflow_without_gpus(tmp_path):
    built = [sys.executable, "setup.py", "-q", "build_ext", "--cuda"]
    folders = ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
    subprocess.run([*built, *folders], cwd=ROOT, check=True, timeout=500)
    library = tmp_path / "lib" / "tfposeidon" / "native" / "_ops.so"
    asked = [sys.executable, "-c", REGISTERED, str(library), *ON_HOST]
    output = subprocess.run(asked, cwd=ROOT, check=True, capture_output=True, text=True, timeout=100).stdout
    has_gpu_kernels, found = json.loads(output.splitlines()[-1])
    assert has_gpu_kernels
    for op, on_host in ON_HOST.items():
        # Mostly two types of index, or of wire, on each device.
        assert sorted(found[op]) == sorted([["CPU", []], ["GPU", on_host]] * (1 if op in ONE_TYPE else 2)), op
