"""One rank of a job that finds its peers: sums the ranks; with "kill", rank 0 is killed then.

With "lab KIND", the ranks of the lab get the variables of another kind in place of Horovod's.
"""

import json
import os
import signal
import sys

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


def take_variables_of(kind):
    """Numbers the ranks of two nodes in turn, as some platforms do."""
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    node, position = divmod(rank, size // 2)
    for name in [name for name in os.environ if name.startswith(("HOROVOD_", "NCCL_"))]:
        del os.environ[name]
    hosts = ["10.99.0.1", "10.99.0.2"] * (size // 2)
    os.environ.update(KINDS[kind](2 * position + node, size, hosts))


def main(what):
    import tfposeidon as tp

    topology = tp.init(start_timeout_s=float(os.environ.get("START_TIMEOUT_S", "60")))
    total = int(tp.all_reduce(topology.rank, op="sum"))
    print(f"rank {topology.rank} of {topology}: nodes {topology.nodes}, sum {total}", flush=True)
    if what == "kill":
        if topology.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        tp.all_reduce(1.0)


if __name__ == "__main__":
    if sys.argv[1] == "lab":
        take_variables_of(sys.argv[2])
    main(sys.argv[1])
