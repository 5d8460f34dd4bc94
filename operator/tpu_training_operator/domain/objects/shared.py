"""The Service and the ConfigMap that one gang of workers shares.

The host list stands once, in the ConfigMap, and each pod refers to it: with the list in every pod the bytes written
would grow with the square of the hosts.
"""

import json
from typing import Any

from tpu_training_operator.api import constants
from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.validation import InvalidJob, Problem
from tpu_training_operator.domain.naming import (
    config_map_name,
    host_name,
    job_labels,
    service_name,
    workers,
)
from tpu_training_operator.domain.objects.run_spec import run_spec
from tpu_training_operator.domain.recipe.resolve import Resolution
from tpu_training_operator.domain.report import Reporting

Object = dict[str, Any]


def owner_reference(job: TPUTrainingJob) -> Object:
    return {
        "apiVersion": constants.API_VERSION,
        "kind": constants.KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def metadata(job: TPUTrainingJob, name: str, labels: dict[str, str]) -> Object:
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": labels,
        "ownerReferences": [owner_reference(job)],
    }


def service(job: TPUTrainingJob) -> Object:
    """Headless, so that every worker has a DNS name; before it is ready, since workers meet in order to become so."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, service_name(job.name), job_labels(job.name)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {constants.LABEL_JOB_NAME: job.name},
        },
    }


def hosts_key(slice_index: int) -> str:
    """The ConfigMap's key for the host names of one slice, comma-separated, in the order of TPU_WORKER_ID."""
    return f"hosts-{slice_index}"


# What the API server takes of one ConfigMap's data.
_LARGEST_CONFIG_MAP = 2**20
# The certificate that workers trust, with room to spare.
_CERTIFICATE = 16_384
_LAST_ATTEMPT = 99_999


def check_config_map(job: TPUTrainingJob, resolution: Resolution) -> None:
    """Raises InvalidJob where the run spec and the host list are more than a ConfigMap holds."""
    data = config_map(job, resolution, _LAST_ATTEMPT)["data"]
    size = sum(len(key) + len(value.encode()) for key, value in data.items())
    if size > _LARGEST_CONFIG_MAP - _CERTIFICATE:
        parameters = len(json.dumps(dict(job.spec.recipe.parameters or {})))
        message = (
            f"the run spec and the names of {resolution.layout.hosts} hosts take {size} bytes, {parameters} of them for"
            f" the parameters as JSON; a ConfigMap holds {_LARGEST_CONFIG_MAP}: put large values into a file"
        )
        raise InvalidJob([Problem("spec.recipe.parameters", message)])


def config_map(job: TPUTrainingJob, resolution: Resolution, attempt: int, reporting: Reporting | None = None) -> Object:
    layout = resolution.layout
    hosts: dict[str, list[str]] = {}
    # A host alone in its slice is localhost to itself.
    for worker in workers(layout, attempt) if layout.hosts_per_slice > 1 else ():
        hosts.setdefault(hosts_key(worker.slice), []).append(host_name(job.name, layout, worker))
    data = {key: ",".join(names) for key, names in hosts.items()}
    data[constants.RUN_SPEC_FILE] = json.dumps(run_spec(job, resolution, attempt), indent=1) + "\n"
    if reporting is not None:
        data[constants.CA_CERTIFICATE_KEY] = reporting.ca_certificate
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, config_map_name(job.name, attempt), job_labels(job.name)),
        "immutable": True,
        "data": data,
    }
