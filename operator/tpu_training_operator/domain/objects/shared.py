"""Builds what the workers of a gang share: the Service, the ConfigMaps and the NetworkPolicy.

A ConfigMap holds the list of hosts once, and each pod refers to it. With a list in every pod, the bytes written would
grow with the square of the number of hosts. The variables that are the same for all workers have a ConfigMap of their
own, because a container gets all of its keys: in every pod they would be half of what the API server has to process.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from tpu_training_operator.api import constants
from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.validation import InvalidJob, Problem
from tpu_training_operator.api.words import count
from tpu_training_operator.domain.cluster_state.worker_reports import Reporting
from tpu_training_operator.domain.job import naming
from tpu_training_operator.domain.job.recipe.resolve import Resolution
from tpu_training_operator.domain.objects.run_spec import run_spec
from tpu_training_operator.domain.objects.worker_env import hosts_key, shared_env

Object = dict[str, Any]


def metadata(job: TPUTrainingJob, name: str, labels: dict[str, str]) -> Object:
    owner = {"apiVersion": constants.API_VERSION, "kind": constants.KIND, "name": job.name, "uid": job.uid}
    owners = [owner | {"controller": True, "blockOwnerDeletion": True}]
    return {"name": name, "namespace": job.namespace, "labels": labels, "ownerReferences": owners}


def service(job: TPUTrainingJob) -> Object:
    """Returns a headless Service, which gives every worker a DNS name. It has no selector: see `endpoints`."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, naming.service_name(job.name), naming.job_labels(job.name)),
        "spec": {"clusterIP": "None"},
    }


# Room for the certificate that workers trust, and more.
_CERTIFICATE = 16_384
_LAST_ATTEMPT = 99_999
# With fewer bytes of parameters and of names nothing needs to be measured, because the rest of a job is small.
_SMALL = 32_768


def check_config_map(job: TPUTrainingJob, resolution: Resolution) -> None:
    """Raises InvalidJob if a ConfigMap cannot hold the run spec, the variables or the host list."""
    parameters = len(orjson.dumps(dict(job.spec.recipe.parameters or {})))
    if max(parameters, resolution.layout.hosts * len(job.name)) < _SMALL:
        return
    bodies = config_map(job, resolution, _LAST_ATTEMPT), env_config_map(job, resolution, _LAST_ATTEMPT)
    size = max(sum(len(key) + len(value.encode()) for key, value in body["data"].items()) for body in bodies)
    if size > constants.LARGEST_CONFIG_MAP - _CERTIFICATE:
        message = (
            f"the run spec and the names of {count(resolution.layout.hosts, 'host')} take {size} bytes, {parameters} of"
            f" them for the parameters as JSON; a ConfigMap holds {constants.LARGEST_CONFIG_MAP}: put large values"
            " into a file"
        )
        raise InvalidJob([Problem("spec.recipe.parameters", message)])


def config_map(
    job: TPUTrainingJob,
    resolution: Resolution,
    attempt: int,
    reporting: Reporting | None = None,
    checked_program: str | None = None,
) -> Object:
    layout = resolution.layout
    hosts: dict[str, list[str]] = {}
    # The only host of a slice calls itself localhost.
    for worker in naming.workers(layout, attempt) if layout.hosts_per_slice > 1 else ():
        hosts.setdefault(hosts_key(worker.slice), []).append(naming.dns_name(job.name, layout, worker))
    data = {key: ",".join(names) for key, names in hosts.items()}
    data[constants.RUN_SPEC_FILE] = _as_text(run_spec(job, resolution, attempt, checked_program))
    if reporting is not None:
        data[constants.CA_CERTIFICATE_KEY] = reporting.ca_certificate
    return _config_map(job, naming.config_map_name(job.name, attempt), data)


def env_config_map(job: TPUTrainingJob, resolution: Resolution, attempt: int) -> Object:
    return _config_map(job, naming.env_config_map_name(job.name, attempt), shared_env(job, resolution, attempt))


def _config_map(job: TPUTrainingJob, name: str, data: Mapping[str, str]) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, name, naming.job_labels(job.name)),
        "immutable": True,
        "data": data,
    }


def _as_text(run_spec: Mapping[str, Any]) -> str:
    """Formats the run spec for people who read the ConfigMap, too. The json module would take a millisecond."""
    return orjson.dumps(run_spec, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode()


@dataclass(frozen=True)
class WorkerNetworkPolicy:
    """Lets only the workers of a job reach each other.

    Their traffic is not encrypted and, except for the rendezvous, not authenticated. `extra_ingress`: further ingress
    rules, for example for a Prometheus that reads libtpu's metrics.
    """

    extra_ingress: tuple[Mapping[str, Any], ...] = ()

    def network_policy(self, job: TPUTrainingJob) -> Object:
        workers = {"podSelector": {"matchLabels": naming.gang_selector(job.name)}}
        return {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": metadata(job, naming.service_name(job.name), naming.job_labels(job.name)),
            "spec": {
                **workers,
                "policyTypes": ["Ingress"],
                "ingress": [{"from": [workers]}, *map(dict, self.extra_ingress)],
            },
        }
