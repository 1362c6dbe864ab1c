"""Tests the jobs that variables of platforms describe, without processes."""

import dataclasses
import json
import os

import pytest

from tfposeidon.peers import sources
from tfposeidon.peers.sources import Job, find

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[01-02]",
    "SLURMD_NODENAME": "n02",
}
KERAS = "KERAS_DISTRIBUTION_"


def cluster(kind, index, **roles):
    return {"TF_CONFIG": json.dumps({"cluster": roles, "task": {"type": kind, "index": index}})}


def of_run(rank, size):
    job = Job("tfposeidon run", rank, size, "127.0.0.1", (5,), "job", node="node 0", has_store=True)
    return {sources.RUN: json.dumps(dataclasses.asdict(job))}


def pools(kind, index, **roles):
    (text,) = cluster(kind, index, **roles).values()
    return {"CLUSTER_SPEC": text}


@pytest.mark.parametrize(
    ("variables", "rank", "size", "host", "port", "one_per_node"),
    [
        (cluster("worker", 1, worker=["a:1", "b:2"]), 1, 2, "a", 1, True),
        (cluster("worker", 0, chief=["c:5"], worker=["a:1", "b:2"]), 1, 3, "c", 5, True),
        (cluster("master", 0, worker=["a:1"], master=["m:6"]), 0, 2, "m", 6, True),
        (cluster("worker", 2, worker=["a:1", "b:1", "a:2", "b:2"]), 2, 4, "a", 1, False),
        (
            pools("workerpool1", 0, workerpool0=["v:2222"], workerpool1=["w:2222"]),
            1,
            2,
            "v",
            2222,
            1,
        ),
        (TORCHRUN, 1, 4, "a", 29500, False),
        (
            {k: v for k, v in TORCHRUN.items() if k != "LOCAL_RANK"},
            *(1, 4, "a", 29500, True),
        ),
        (
            # A PyTorchJob has two pods with `nprocPerNode: "8"`.
            {
                **{k: v for k, v in TORCHRUN.items() if k != "LOCAL_RANK"},
                **{"WORLD_SIZE": "16", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8"},
            },
            *(1, 2, "a", 29500, True),
        ),
        (
            {
                "PET_NNODES": "2",
                "PET_NODE_RANK": "1",
                "PET_MASTER_ADDR": "j-node-0-0.j",
                "PET_MASTER_PORT": "29500",
            },
            *(1, 2, "j-node-0-0.j", 29500, True),
        ),
        ({f"{KERAS}PROCESS_ID": "1", f"{KERAS}JOB_ADDRESSES": "a:1,b:2"}, 1, 2, "a", 1, True),
        (
            {
                f"{KERAS}PROCESS_ID": "2",
                f"{KERAS}NUM_PROCESSES": "3",
                f"{KERAS}JOB_ADDRESSES": "a:1",
            },
            *(2, 3, "a", 1, False),
        ),
        (SLURM, 3, 4, "n01", None, False),
        (
            {
                "JOB_COMPLETION_INDEX": "2",
                "TFPOSEIDON_NODES": "3",
                "HOSTNAME": "train-2.peers.default.svc",
            },
            *(2, 3, "train-0.peers.default.svc", None, True),
        ),
    ],
)
def test_a_platform_describes_a_job(variables, rank, size, host, port, one_per_node):
    job = find(variables)
    assert (job.rank, job.size, job.host) == (rank, size, host)
    assert job.one_per_node == one_per_node
    if port is None:
        assert all(20_000 <= one < 30_000 for one in job.ports)
    else:
        assert job.ports == (port,)


def test_identities_are_equal_within_a_job_and_differ_between_jobs():
    def identity(index, *addresses):
        return find(cluster("worker", index, worker=[*addresses])).identity

    assert identity(0, "a:1", "b:1") == identity(1, "a:1", "b:1")
    assert identity(0, "a:1", "b:1") != identity(0, "a:1", "c:1")
    restarted = find({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert restarted.identity != find(TORCHRUN).identity
    several = {**TORCHRUN, "GROUP_WORLD_SIZE": "2"}
    # The agents of several nodes count restarts independently.
    assert find({**several, "TORCHELASTIC_RESTART_COUNT": "1"}).identity == find(several).identity
    assert find({**TORCHRUN, "WORLD_SIZE": "5"}).identity != find(TORCHRUN).identity
    trainjob = {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "a",
        "PET_MASTER_PORT": "1",
    }
    assert find({**trainjob, "PET_NNODES": "3"}).identity != find(trainjob).identity
    requeued = find({**SLURM, "SLURM_RESTART_COUNT": "1"})
    assert requeued.identity != find(SLURM).identity
    assert requeued.ports != find(SLURM).ports


def test_the_port_of_torchruns_agent_is_not_used():
    job = find({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert 29500 not in job.ports


def test_user_settings_replace_the_address():
    job = find({**SLURM, "TFPOSEIDON_PORT": "4711", "TFPOSEIDON_HOST": "10.0.0.1"})
    assert (job.host, job.ports) == ("10.0.0.1", (4711,))


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"TF_CONFIG": "{}"},
        {"MASTER_ADDR": "a", "MASTER_PORT": "1"},
        # A batch script has some variables of a step, but is a single process.
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"},
        {"SLURM_STEP_NUM_TASKS": "4"},
        # salloc starts an interactive step.
        {**SLURM, "SLURM_STEP_ID": "4294967290"},
        # A pod may train alone.
        {"JOB_COMPLETION_INDEX": "3", "TFPOSEIDON_NODES": "1", "HOSTNAME": "a-3"},
    ],
)
def test_other_variables_describe_no_job(variables):
    assert find(variables) is None


def test_the_first_complete_source_describes_the_job():
    both = {**cluster("worker", 0, worker=["a:1", "b:1"]), **TORCHRUN}
    assert find(both).source == "TF_CONFIG"
    assert find({**SLURM, "RANK": "0"}).source == "SLURM"
    assert [*map(str, sources.jobs({**SLURM, "RANK": "0"}))] == [
        "torchrun lacks WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
        "SLURM: rank 3 of 4",
    ]


@pytest.mark.parametrize(
    "alone",
    [cluster("worker", 0, worker=["a:1"]), pools("workerpool0", 0, workerpool0=["[::1]:1"])],
)
def test_a_job_of_one_process_counts_only_if_there_is_no_larger_one(alone):
    assert find({**alone, **TORCHRUN}).size == 4
    assert find({**alone, **SLURM}).size == 4
    assert find({**alone, "RANK": "0"}).size == 1
    assert find({**of_run(0, 1), **alone, **TORCHRUN}).source == "tfposeidon run"


def test_a_host_name_may_replace_an_ipv6_address():
    variables = cluster("worker", 0, worker=["[::1]:1", "[::1]:2"])
    assert find({**variables, "TFPOSEIDON_HOST": "node1"}).host == "node1"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "torchrun lacks MASTER_ADDR, MASTER_PORT"),
        ({"JOB_COMPLETION_INDEX": "0", "HOSTNAME": "a-0"}, "Indexed Job lacks TFPOSEIDON_NODES"),
        ({"SLURM_STEP_ID": "0"}, "SLURM lacks SLURM_STEP_NODELIST, SLURM_STEP_NUM_TASKS"),
    ],
)
def test_incomplete_sources_are_named(variables, message):
    with pytest.raises(ValueError, match=rf"must be complete\. Received: {message}"):
        find(variables)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"TF_CONFIG": "worker"}, "must be a JSON object"),
        (cluster("worker", 0, worker={"1": "a:1"}), "lists all addresses of each role"),
        (cluster("worker", 0, worker=[1, 2]), "lists all addresses of each role"),
        ({"TF_CONFIG": '{"cluster": ["a:1"], "task": {}}'}, r"must be a JSON object.* Set it to"),
        (
            {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": "worker"}'},
            r"must be a JSON object.* Set it to",
        ),
        (
            {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'},
            r"with a type and an index\. Received: .*KeyError\('task'\)",
        ),
        (cluster("worker", "x", worker=["a:1"]), "with a type and an index.*'x'"),
        (cluster("ps", 0, worker=["a:1"], ps=["b:1"]), r"roles that train.* Received: ps\. Remove"),
        (cluster("evaluator", 0, worker=["a:1"]), "roles that train.*evaluator"),
        (
            cluster("worker", 2, worker=["a:1", "b:1"]),
            "part of its cluster.*worker 2, and 2 worker",
        ),
        (cluster("worker", 0, worker=["a", "b"]), r"form host:port\. Received from TF_CONFIG: 'a'"),
        (cluster("worker", 0, worker=["[::1]:1", "[::1]:2"]), "IPv4.*TF_CONFIG: '::1'"),
        (
            cluster("worker", 0, chief=["a:1"], worker=["b:1", "a:1"]),
            r"addresses of TF_CONFIG must differ\. Received more than once: a:1\. Set",
        ),
        ({**TORCHRUN, "RANK": "4"}, "rank must be in 0.*torchrun: rank 4 of 4"),
        ({**TORCHRUN, "RANK": "one"}, "RANK must be a number"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "1"}, "less than LOCAL_WORLD_SIZE. Received: 1 of 1"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "less than LOCAL_WORLD_SIZE. Received: 4 of 4"),
        (
            {**SLURM, "SLURMD_NODENAME": "login1"},
            r"must be in SLURM_STEP_NODELIST\. Received: 'login1' and 'n\[01-02\]'",
        ),
        (
            {**SLURM, "SLURMD_NODENAME": "n3", "SLURM_STEP_NODELIST": "n1,n2"},
            "must be in SLURM_STEP_NODELIST. Received: 'n3' and 'n1,n2'",
        ),
        (
            {
                "PET_NNODES": "1:2",
                "PET_NODE_RANK": "0",
                "PET_MASTER_ADDR": "a",
                "PET_MASTER_PORT": "1",
            },
            "PET_NNODES must be a number",
        ),
        (
            {"JOB_COMPLETION_INDEX": "1", "TFPOSEIDON_NODES": "2", "HOSTNAME": "pod"},
            "must end in its index",
        ),
        (
            {
                f"{KERAS}PROCESS_ID": "0",
                f"{KERAS}NUM_PROCESSES": "3",
                f"{KERAS}JOB_ADDRESSES": "a:1,b:1",
            },
            "2 addresses of 3 processes",
        ),
    ],
)
def test_contradictory_variables_are_refused(variables, message):
    with pytest.raises(ValueError, match=message):
        find(variables)
    assert [*sources.jobs(variables)]


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("n[01-03,07],gpu1", "n01"),
        ("rack[2,4]n[08-09]", "rack2n08"),
    ],
)
def test_the_first_host_of_a_list_of_nodes_is_found(nodes, host):
    assert sources.first_host(nodes) == host


def test_tokens_come_from_private_files(tmp_path):
    file = tmp_path / "token"
    file.write_text("secret\n")
    file.chmod(0o600)
    variables = {"TFPOSEIDON_TOKEN_FILE": str(file)}
    assert sources.token(variables) == "secret"
    file.chmod(0o640)
    with pytest.raises(ValueError, match=rf"mode 0640, owned by uid {os.geteuid()}.*chmod 600"):
        sources.token(variables)
    file.chmod(0o600)
    file.write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        sources.token(variables)
    assert sources.token({"TFPOSEIDON_TOKEN": "other"}) == "other"
    assert sources.token({}) is None
