"""Tests the bytes that the other frameworks of the benchmarks send, on two nodes of the lab."""

import importlib.util
import json
import math
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks import architectures, harness
from tests.launch import ahead, lab

RANKS = 2
MODEL, SHRINK = "alexnet", 4
POWERSGD_RANK = 4


def answers(worker, systems):
    """Returns the measurements of a worker, by system."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        task = {"model": MODEL, "shrink": SHRINK, "dilation": 0.05, "warm_up": 3, "steps": 4}
        task |= {"systems": systems, "result": str(result)}
        module = f"benchmarks.workers.{worker}"
        python = harness.INTERPRETERS.get(worker, sys.executable)
        done = lab(f"--nodes {RANKS} --inter 200mbit", python, "-m", module, json.dumps(task))
        assert done.returncode == 0, done.stdout
        found = json.loads(result.read_text())
    assert list(found) == systems
    return found


def check(answer, sent_bytes):
    """Checks that all steps were timed, and that a node sent these bytes to within 5 %."""
    assert "error" not in answer, answer["error"]
    assert len(answer["step_s"]) == 4
    assert min(answer["step_s"]) > 0
    assert answer["sent_bytes"] == pytest.approx(sent_bytes, rel=0.05)


def all_reduce_bytes(elements, element_bytes=4):
    """Returns the bytes that each rank sends in a ring, 2 (P - 1) / P of the vector."""
    return 2 * (RANKS - 1) / RANKS * elements * element_bytes


def parameters():
    return architectures.model(MODEL).shrunk(SHRINK).parameters


def powersgd_elements():
    """Returns the number of values that PowerSGD sends.

    It sends r (n + m) values, the factors P and Q, of a matrix `[n, m]` if they are less than half
    of n m, and other gradients whole.
    """
    elements = 0
    for layer in architectures.model(MODEL).shrunk(SHRINK).layers:
        n, m = layer.kernel[-1], math.prod(layer.kernel[:-1])
        factors = min(n, m, POWERSGD_RANK) * (n + m)
        elements += (factors if 2 * factors < n * m else n * m) + sum(layer.vectors)
    return elements


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="requires PyTorch")
@ahead(lambda: answers("ddp", ["ddp", "ddp-fp16", "ddp-powersgd", "unknown"]))
def test_pytorch_ddp_sends_the_output_of_its_hooks(outcome):
    found = outcome
    check(found["ddp"], all_reduce_bytes(parameters()))
    check(found["ddp-fp16"], all_reduce_bytes(parameters(), element_bytes=2))
    check(found["ddp-powersgd"], all_reduce_bytes(powersgd_elements()))
    assert found["ddp-powersgd"]["sent_bytes"] < found["ddp"]["sent_bytes"] / 5
    assert (
        "`systems` must be among ddp, ddp-fp16, ddp-powersgd. Received: 'unknown'"
        in found["unknown"]["error"]
    )


@ahead(lambda: answers("mirrored", ["mirrored", "mirrored-packs"]))
def test_mirrored_strategy_sends_a_ring_all_reduce(outcome):
    for answer in outcome.values():
        check(answer, all_reduce_bytes(parameters()))


@pytest.mark.skipif(not harness.JAX.exists(), reason=f"requires JAX. Run: {harness.JAX_REMEDY}")
@ahead(lambda: answers("jax_fit", ["jax"]))
def test_keras_on_jax_exchanges_every_gradient_once(outcome):
    check(outcome["jax"], all_reduce_bytes(parameters()))
