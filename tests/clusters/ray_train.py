"""Runs two ranks under a real Ray, whose `TensorflowTrainer` sets `TF_CONFIG`.

    pip install --target /tmp/ray_packages 'ray[train]'     # beside TensorFlow's own packages
    PYTHONPATH=.:SITE_PACKAGES:/tmp/ray_packages python tests/clusters/ray_train.py

SITE_PACKAGES is the folder with TensorFlow, which must precede Ray's packages.
"""

import os

import ray
from ray.train import ScalingConfig
from ray.train.tensorflow import TensorflowTrainer


def train():
    import tfposeidon as tp

    topology = tp.init(start_timeout_s=60)
    assert topology.nodes == ((0, 1),)
    assert int(tp.all_reduce(topology.rank + 1, op="sum")) == 3
    print(f"rank {topology.rank} of {topology} is right", flush=True)


if __name__ == "__main__":
    variables = {"PYTHONPATH": os.environ["PYTHONPATH"]}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": variables})
    TensorflowTrainer(train, scaling_config=ScalingConfig(num_workers=2)).fit()
    ray.shutdown()
