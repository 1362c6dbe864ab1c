"""One rank of a job that starts without a launcher, and sums the ranks of the job.

With "kill", rank 0 is killed afterwards. With "lab KIND", ranks of the lab receive the variables of
this kind of platform in place of Horovod's. With "nodes", each node of the lab calls `run`, which
starts two ranks, with the variables of each kind that describes nodes. These ranks ("join KIND") do
not import TensorFlow.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

KINDS = {
    "TF_CONFIG": lambda rank, size, hosts: {
        "TF_CONFIG": json.dumps(
            {
                "cluster": {"worker": [f"{host}:{7000 + i}" for i, host in enumerate(hosts)]},
                "task": {"type": "worker", "index": rank},
            }
        )
    },
    "torchrun": lambda rank, size, hosts: {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank // 2),
        "MASTER_ADDR": hosts[0],
        "MASTER_PORT": "7000",
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    },
    "SLURM": lambda rank, size, hosts: {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NODELIST": ",".join(dict.fromkeys(hosts)),
        "SLURMD_NODENAME": hosts[rank],
    },
    "KERAS_DISTRIBUTION": lambda rank, size, hosts: {
        "KERAS_DISTRIBUTION_PROCESS_ID": str(rank),
        "KERAS_DISTRIBUTION_NUM_PROCESSES": str(size),
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": f"{hosts[0]}:7000",
    },
}
NODE_KINDS = {
    "CLUSTER_SPEC": lambda node, hosts: {
        "CLUSTER_SPEC": json.dumps(
            {
                "cluster": {f"workerpool{i}": [f"{host}:2222"] for i, host in enumerate(hosts)},
                "task": {"type": f"workerpool{node}", "index": 0},
            }
        )
    },
    "PyTorchJob": lambda node, hosts: {
        "RANK": str(node),
        "WORLD_SIZE": str(len(hosts)),
        "MASTER_ADDR": hosts[0],
        "MASTER_PORT": "23456",
    },
    "TrainJob": lambda node, hosts: {
        "PET_NODE_RANK": str(node),
        "PET_NNODES": str(len(hosts)),
        "PET_NPROC_PER_NODE": "auto",
        "PET_MASTER_ADDR": hosts[0],
        "PET_MASTER_PORT": "29500",
    },
    "Indexed Job": lambda node, hosts: {
        "JOB_COMPLETION_INDEX": str(node),
        "TFPOSEIDON_NODES": str(len(hosts)),
        "HOSTNAME": f"train-{node}",
        "TFPOSEIDON_HOST": hosts[0],
    },
}
FAILING_KIND, FAILING_RANK = "Indexed Job", 3
HOSTS = ["10.99.0.1", "10.99.0.2"]
LATE = {"torchrun": 0, "SLURM": 3}
"""Kind of platform -> the rank that starts late."""
LATE_S = 3


def without_launcher():
    """Removes the lab's variables, and returns this rank and the number of ranks."""
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    for name in [name for name in os.environ if name.startswith(("HOROVOD_", "NCCL_"))]:
        del os.environ[name]
    return rank, size


def take_variables_of(kind):
    """Numbers the ranks of two nodes alternately, as some platforms do."""
    rank, size = without_launcher()
    node, position = divmod(rank, size // 2)
    rank = 2 * position + node
    os.environ.update(KINDS[kind](rank, size, HOSTS * (size // 2)))
    if rank == LATE.get(kind):
        print(f"rank {rank} starts late", flush=True)
        time.sleep(LATE_S)


def run_in_turn():
    """Starts two ranks of each kind on this node; one of the two nodes starts late."""
    node, _ = without_launcher()
    command = [sys.executable, "-m", "tfposeidon", "run", "--per-node", "2", "--"]
    for index, (kind, variables_of) in enumerate(NODE_KINDS.items()):
        if index % 2 == node:
            time.sleep(LATE_S)
        environment = {**os.environ, **variables_of(node, HOSTS)}
        done = subprocess.run([*command, sys.executable, __file__, "join", kind], env=environment)
        print(f"{kind} ended with {done.returncode} on node {node}", flush=True)


def join(kind):
    from tfposeidon.peers import rendezvous, store

    nodes = rendezvous.join(60.0, has_mpi=False)
    rank = int(os.environ["HOROVOD_RANK"])
    place, prefix = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"].split("/")
    host, port = place.split(":")
    print(f"{kind}: rank {rank} of nodes {nodes} at {os.environ[rendezvous.INTERFACE]}", flush=True)
    check_command_lines()
    # Report an exit status, because `run` on node 0 waits for that of each rank.
    client = rendezvous.Client(host, int(port), prefix)
    client.put_first(store.FAILURES, store.EXIT_STATUS.format(rank), "ended")
    if kind == FAILING_KIND:
        if rank == FAILING_RANK:
            sys.exit(3)
        if rank in nodes[0]:
            time.sleep(600)


def check_command_lines():
    """Asserts that no command line contains the token or the key, which all users could read."""
    key = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "").partition("/")[2]
    secrets = [one for one in (key, os.environ.get("TFPOSEIDON_TOKEN")) if one]
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = file.read_text(errors="replace")
        except OSError:
            # The process has ended meanwhile.
            continue
        assert not any(secret in text for secret in secrets), text
    print(f"{len(secrets)} secrets are on no command line", flush=True)


def main(what):
    import tfposeidon as tp

    topology = tp.init(start_timeout_s=float(os.environ.get("START_TIMEOUT_S", "60")))
    total = int(tp.all_reduce(topology.rank, op="sum"))
    print(f"rank {topology.rank} of {topology}: nodes {topology.nodes}, sum {total}", flush=True)
    check_command_lines()
    if what == "kill":
        if topology.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        tp.all_reduce(1.0)


if __name__ == "__main__":
    what = sys.argv[1]
    if what == "nodes":
        run_in_turn()
    elif what == "join":
        join(sys.argv[2])
    else:
        if what == "lab":
            take_variables_of(sys.argv[2])
        main(what)
