"""Runs the GPU checks on CPUs, with small sizes."""

import sys

import pytest

from tests.launch import ahead, finish, horovodrun, start

CHECK = ["-m", "benchmarks.gpu_check", "--small"]
ON_CPUS = {"CUDA_VISIBLE_DEVICES": ""}


def one(stages):
    """Runs stages in one process."""
    return finish(start([sys.executable, *CHECK, *stages], ON_CPUS))


def two(stages):
    """Runs stages on two ranks."""
    return horovodrun(2, *CHECK, *stages, environment=ON_CPUS)


@ahead(lambda job, stages: job(stages))
@pytest.mark.parametrize(
    ("job", "stages"),
    [(one, ("see", "ops", "times", "one", "speed", "check")), (two, ("two", "nccl"))],
    ids=["one", "two"],
)
def test_the_checks_pass_on_cpus(job, stages, outcome):
    assert outcome.returncode == 0, outcome.stdout[-4000:]
    for stage in stages:
        assert f"ok   {stage}." in outcome.stdout, stage
