"""Options of `python -m tfposeidon run`, without ranks."""

import argparse
import json

import pytest

from tfposeidon.peers import run


def options(*words):
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    return parser.parse_args(words)


def test_nodes_from_the_command_line():
    job = run.read_job(options("--nodes", "2", "--node-rank", "1", "--master", "a:5"), {})
    assert (job.rank, job.size, job.host, job.ports) == (1, 2, "a", (5,))
    assert job.name_of(1) == "node 1"


def test_nodes_from_the_platform_or_one():
    cluster = {"worker": ["a:1", "b:1"]}
    variables = {
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}})
    }
    job = run.read_job(options(), variables)
    assert (job.rank, job.size, job.host, job.unit) == (1, 2, "a", "node")
    alone = run.read_job(options(), {})
    assert (alone.size, alone.host, alone.ports) == (1, "127.0.0.1", (0,))


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (["--nodes", "2"], {}, "given together.*--node-rank None, --master None"),
        (["--nodes", "2", "--node-rank", "2", "--master", "a:5"], {}, "rank 2 of 2"),
        (["--nodes", "2", "--node-rank", "0", "--master", "a"], {}, "form host:port"),
        (
            [],
            {
                "RANK": "1",
                "WORLD_SIZE": "4",
                "LOCAL_RANK": "1",
                "MASTER_ADDR": "a",
                "MASTER_PORT": "1",
            },
            "Received from torchrun: several processes per node.*Leave out",
        ),
    ],
)
def test_nodes_that_make_no_sense(words, variables, message):
    with pytest.raises(ValueError, match=message):
        run.read_job(options(*words), variables)


def test_one_node_draws_a_token_and_several_do_not():
    alone = run.read_job(options(), {})
    assert len(run.read_token(options(), {}, alone)) == 32
    assert run.read_token(options(), {}, alone) != run.read_token(options(), {}, alone)
    words = ("--nodes", "2", "--node-rank", "1", "--master", "a:5")
    assert run.read_token(options(*words), {}, run.read_job(options(*words), {})) is None


@pytest.mark.parametrize(
    ("asked", "variables", "gpus", "count"),
    [
        (None, {}, ["0", "1"], 2),
        (3, {}, ["0", "1"], 3),
        (3, {}, [], 3),
        (None, {"PET_NPROC_PER_NODE": "4"}, [], 4),
        (None, {"PET_NPROC_PER_NODE": "gpu"}, ["0"], 1),
    ],
)
def test_ranks_of_this_machine(asked, variables, gpus, count):
    assert run.ranks_here(asked, variables, gpus) == count


@pytest.mark.parametrize("asked", [None, 0])
def test_ranks_without_gpus_must_be_counted(asked):
    with pytest.raises(ValueError, match=rf"at least 1.*--per-node {asked} and 0 visible"):
        run.ranks_here(asked, {}, [])


@pytest.mark.parametrize(
    ("given", "gpus"),
    [("", []), ("-1", []), ("2,5", ["2", "5"]), ("GPU-a,MIG-b", ["GPU-a", "MIG-b"])],
)
def test_visible_gpus_are_those_of_the_variable(given, gpus):
    assert run.visible_gpus({"CUDA_VISIBLE_DEVICES": given}) == gpus


@pytest.mark.parametrize("words", [[], ["--"], ["--", "/no/such/program"]])
def test_a_command_is_required(words):
    with pytest.raises(ValueError, match="A command is required"):
        run.read_command(words)
    assert run.read_command(["--", "true", "-x"]) == ["true", "-x"]
