"""Runs `examples/cluster/ray_train.py` under a real Ray; `make test-clusters` starts it.

PYTHONPATH must list the folder with TensorFlow before that with Ray's packages.
"""

import os
import runpy

import ray

if __name__ == "__main__":
    variables = {"PYTHONPATH": os.environ["PYTHONPATH"]}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": variables})
    runpy.run_path("examples/cluster/ray_train.py", run_name="__main__")
    ray.shutdown()
