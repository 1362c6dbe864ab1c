"""Checks the Kubernetes jobs in `examples/cluster` against schemas from two PyPI packages.

pip install kubernetes-validate kubeflow-trainer-api
python tests/clusters/schemas.py

No package has a schema of MPIJob v2beta1, so only the pod templates of an MPIJob are checked.
"""

from pathlib import Path

import kubernetes_validate
import yaml
from kubeflow_trainer_api import models

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"


def documents(name):
    return yaml.safe_load_all((FOLDER / name).read_text())


def check(document):
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


for one in documents("indexed-job.yaml"):
    check(one)
(job,) = documents("mpijob.yaml")
for replicas in job["spec"]["mpiReplicaSpecs"].values():
    template = {"metadata": {"name": "pod"}, "template": replicas["template"]}
    check({"apiVersion": "v1", "kind": "PodTemplate", **template})
(job,) = documents("trainjob.yaml")
read = models.TrainerV1alpha1TrainJob.from_dict(job)
# These models ignore unknown fields, which are then missing from the result.
assert read.to_dict() == job, read.to_dict()
print("the jobs agree with their schemas")
