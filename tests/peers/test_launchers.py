"""Tests which variables determine a rank if both a launcher and a platform set variables."""

from types import SimpleNamespace
from unittest import mock

import pytest

from tests.peers.test_sources import SLURM, TORCHRUN, cluster, of_run
from tfposeidon.commands import check
from tfposeidon.communication import launcher, start
from tfposeidon.communication.launcher import ProcessRank
from tfposeidon.peers import rendezvous

MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
RUN = of_run(1, 2)
ALONE_IN_RUN = of_run(0, 1)
ONE_WORKER = cluster("worker", 0, worker=["a:1"])


@pytest.fixture
def environment(monkeypatch):
    """Sets the variables of a test, and whether Horovod is built with MPI."""

    def given(variables, has_mpi=False):
        monkeypatch.setattr(launcher.os, "environ", dict(variables))
        monkeypatch.setattr(launcher, "has_mpi", lambda: has_mpi)

    return given


@pytest.mark.parametrize(
    ("variables", "has_mpi", "expected"),
    [
        (MPIRUN, True, ProcessRank(2, 4, 2, 4)),
        # tfposeidon.init() refuses this job, because Horovod has one process.
        (MPIRUN, False, ProcessRank(2, 4, 2, 4)),
        ({**MPIRUN, **ONE_WORKER}, False, ProcessRank(2, 4, 2, 4)),
        ({**MPIRUN, **RUN}, True, ProcessRank(1, 2)),
        ({**MPIRUN, **ALONE_IN_RUN}, True, ProcessRank()),
        ({**MPIRUN, **TORCHRUN}, True, ProcessRank(2, 4, 2, 4)),
        ({**MPIRUN, **TORCHRUN}, False, ProcessRank(1, 4)),
        ({**SLURM, "PMIX_RANK": "3"}, False, ProcessRank(3, 4)),
        ({**TORCHRUN, "HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}, False, ProcessRank()),
    ],
)
def test_variables_determine_the_rank_of_a_process(environment, variables, has_mpi, expected):
    environment(variables, has_mpi)
    assert launcher.process_rank() == expected


def horovod(rank=0, size=1):
    return SimpleNamespace(
        init=mock.Mock(), rank=lambda: rank, size=lambda: size, local_size=lambda: size
    )


def test_mpirun_with_a_horovod_without_mpi_is_refused():
    message = "must agree. Received: rank 2 of 4 from the environment, rank 0 of 1 from Horovod"
    with pytest.raises(RuntimeError, match=message):
        start.start_over_mpi(horovod(), ProcessRank(2, 4), None, pin_gpu=True)


def test_a_single_rank_horovod_in_a_larger_job_is_refused(environment):
    environment(TORCHRUN)
    message = r"found one rank, but the environment describes 4\. Replace hvd\.init\(\)"
    with pytest.raises(RuntimeError, match=message):
        start.adopt(horovod(), None, None)
    environment(ONE_WORKER)
    assert start.adopt(horovod(), None, None).topology.size == 1


def test_check_reports_the_launcher_before_the_platform(environment):
    environment({rendezvous.LAUNCHER: "0"})
    assert [*check.peer_rows()] == [("job described by", "a launcher, which has set HOROVOD_RANK")]
    environment({**TORCHRUN, **MPIRUN, "PET_NNODES": "2"}, has_mpi=True)
    assert [*check.peer_rows()] == [
        ("job described by", "a launcher, which has set OMPI_COMM_WORLD_RANK"),
        (
            "other sources",
            "torchrun: rank 1 of 4; TrainJob lacks PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT",
        ),
    ]
    environment({**TORCHRUN, **MPIRUN})
    assert [name for name, _ in check.peer_rows()] == ["job described by", "rendezvous"]
