"""Tests notes and registrations without GPU kernels; `tests/jobs/test_cuda.py` compiles them."""

import shutil

import tensorflow as tf

from tfposeidon import native, policies
from tfposeidon.communication.topology import Topology
from tfposeidon.exchange.plan import cpu_advice, make_plan
from tfposeidon.gradients import Description

NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def test_gpu_kernels_are_registered_if_tensorflow_has_gpus():
    assert native.has_gpu_kernels() == (NVCC is not None and tf.test.is_built_with_cuda())


def test_the_plan_notes_that_selection_runs_on_the_cpu(monkeypatch):
    """The GPU in this test is simulated."""
    variables = [Description(path="kernel", shape=(100, 100), dtype="float32")]
    for scheme, words in (
        (
            "hitopk",
            "hitopk: messages are computed on the CPU, because tfposeidon was built without nvcc",
        ),
        ("allreduce", ""),
    ):
        plan = make_plan(variables, policies.parse(scheme), Topology.regular(0, 4, 2), 1 << 20)
        assert cpu_advice(plan) == ""
        with monkeypatch.context() as patch:
            patch.setattr(tf.config, "list_physical_devices", lambda kind: ["GPU:0"])
            assert cpu_advice(plan)[: len(words) or None] == words
