"""Checks the jobs in `examples/cluster`, as far as possible without their platforms."""

import json
import re

import pytest
import yaml

from tests.launch import ROOT
from tfposeidon.peers import sources

FOLDER = ROOT / "examples" / "cluster"


def documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def variables(container):
    """Returns the variables that a container sets; a secret has the value "secret"."""
    return {one["name"]: one.get("value", "secret") for one in container["env"]}


def indexed_job():
    service, job = documents("indexed-job.yaml")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"] == 2
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]
    assert service["metadata"]["name"] == pod["subdomain"]
    name = job["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    host = f"{name}-1.{pod['subdomain']}.default.svc.cluster.local"
    (container,) = pod["containers"]
    return {**variables(container), "JOB_COMPLETION_INDEX": "1", "HOSTNAME": host}


def trainjob():
    (job,) = documents("trainjob.yaml")
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    return {
        **variables(trainer),
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29500",
    }


def vertex():
    (job,) = documents("vertex.yaml")
    first, second = job["workerPoolSpecs"]
    assert first["replicaCount"] == 1
    assert {**first, "replicaCount": 0} == {**second, "replicaCount": 0}
    cluster = {
        "workerpool0": ["train-0:2222"],
        "workerpool1": [f"train-1-{index}:2222" for index in range(second["replicaCount"])],
    }
    task = {"type": "workerpool1", "index": 0}
    return {"CLUSTER_SPEC": json.dumps({"cluster": cluster, "task": task})}


def azureml():
    (job,) = documents("azureml.yml")
    assert job["distribution"]["type"] == "tensorflow"
    assert job["distribution"]["worker_count"] == job["resources"]["instance_count"]
    workers = [f"10.0.0.{index}:2222" for index in range(job["resources"]["instance_count"])]
    task = {"type": "worker", "index": 1}
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task})}


@pytest.mark.parametrize(
    ("platform", "source", "host", "port"),
    [
        (indexed_job, "Indexed Job", "train-0.train-peers.default.svc.cluster.local", 4711),
        (trainjob, "TrainJob", "train-node-0-0.train", 29500),
        (vertex, "CLUSTER_SPEC", "train-0", 2222),
        (azureml, "TF_CONFIG", "10.0.0.0", 2222),
    ],
)
def test_two_nodes_find_each_other(platform, source, host, port):
    """The variables are those of the file and those that the platform's documentation lists."""
    given = platform()
    known = {sources.NODES, sources.PORT, sources.TOKEN}
    assert {name for name in given if name.startswith("TFPOSEIDON_")} <= known
    job = sources.find(given)
    assert (job.source, job.rank, job.size, job.one_per_node) == (source, 1, 2, True)
    assert (job.host, job.ports) == (host, (port,))


def mappings(tree):
    """Yields all mappings in a document."""
    if isinstance(tree, dict):
        yield tree
    if isinstance(tree, dict | list):
        for one in tree.values() if isinstance(tree, dict) else tree:
            yield from mappings(one)


@pytest.mark.parametrize("name", ["indexed-job.yaml", "trainjob.yaml", "mpijob.yaml"])
def test_pods_have_shared_memory(name):
    """By default, the shared memory of a pod is limited to 64 MB."""
    found = [one for document in documents(name) for one in mappings(document)]
    mounts = [one["name"] for one in found if one.get("mountPath") == "/dev/shm"]
    assert mounts == [one["name"] for one in found if "emptyDir" in one] == ["memory"]
    (volume,) = (one["emptyDir"] for one in found if "emptyDir" in one)
    assert volume["medium"] == "Memory"


def test_mpi_starts_a_rank_on_each_slot():
    (job,) = documents("mpijob.yaml")
    replicas = job["spec"]["mpiReplicaSpecs"]
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    ranks = int(launcher["command"][launcher["command"].index("-np") + 1])
    assert ranks == job["spec"]["slotsPerWorker"] * replicas["Worker"]["replicas"]
    # Names of workers resolve only when they are ready, and a failed launcher is not restarted.
    assert job["spec"]["launcherCreationPolicy"] == "WaitForWorkersReady"


def test_ray_does_not_upload_the_sources_of_the_package():
    """Workers would import these sources, in which the native ops are not compiled."""
    for path in (FOLDER / "ray_train.py", ROOT / "docs" / "clusters.md"):
        folder = re.search(r"--working-dir (\S+) -- python ray_train.py", path.read_text())[1]
        assert (ROOT / folder / "ray_train.py").exists()
        assert not (ROOT / folder / "tfposeidon").exists()


def test_each_file_is_documented_and_names_required_changes():
    page = (ROOT / "docs" / "clusters.md").read_text()
    for path in FOLDER.iterdir():
        assert f"(../examples/cluster/{path.name})" in page
        assert "Change: " in path.read_text()
