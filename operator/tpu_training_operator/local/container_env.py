"""The environment of a worker container, adapted to a process on this machine.

A process shares the machine: mounted directories are elsewhere, DNS knows no pods, the rendezvous port may be taken,
and the home directory is the user's.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

from tpu_contract import protocol
from tpu_training_operator.api.trainer import SHARED_MEMORY
from tpu_training_operator.domain.objects.worker_env import CONTAINER_USER, literal_variables

_LOOPBACK = "127.0.0.1"
_REFERENCE = re.compile(r"\$\$|\$\(([^)]*)\)")


def expand(text: str, values: Mapping[str, str]) -> str:
    """Replaces every `$(NAME)` by its value, as a kubelet does in variables, commands and arguments. A name without a
    value stays as it is, and `$$` is one dollar sign, so that `$$(NAME)` stays text."""

    def replacement(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else values.get(match[1], match[0])

    return _REFERENCE.sub(replacement, text)


def container_env(
    pod: Mapping[str, Any],
    config_maps: Mapping[str, Mapping[str, str]],
    directories: Mapping[str, str],
    rendezvous_port: int,
) -> dict[str, str]:
    """Returns this process's environment, overridden by the pod's variables.

    `directories` maps paths in the container to paths here; `config_maps` holds the data of the ConfigMaps by name. A
    variable from any other source (a Secret, a field of the pod) keeps its value in the shell.
    """
    # Shared memory belongs to the machine and needs no directory.
    directories = {inside: outside for inside, outside in directories.items() if inside.rstrip("/") != SHARED_MEMORY}
    variables: dict[str, str] = {}
    container = pod["spec"]["containers"][0]
    sources = (source.get("configMapRef", {}).get("name", "") for source in container.get("envFrom", ()))
    shared = {name: value for source in sources for name, value in config_maps.get(source, {}).items()}
    for variable in (*literal_variables(shared), *container["env"]):
        name, value = variable["name"], _value(variable, config_maps)
        if name in ("MASTER_PORT", "PET_MASTER_PORT"):
            value = str(rendezvous_port)
        if value is not None and CONTAINER_USER.get(name) != value:
            variables[name] = _here(expand(value, variables), _domains(pod), directories)
    # By default every process starts as many threads as there are cores, and the processes compete.
    hosts, cores = int(variables[protocol.ENV_NUM_HOSTS]), os.cpu_count() or 1
    threads = {"OMP_NUM_THREADS": str(max(1, cores // hosts))}
    # This Python's environment is the user's.
    packages = {protocol.ENV_PACKAGES: protocol.PackageSource.INSTALLED.value}
    return threads | dict(os.environ) | variables | packages


def _value(variable: Mapping[str, Any], config_maps: Mapping[str, Mapping[str, str]]) -> str | None:
    if "value" in variable:
        return str(variable["value"])
    reference = variable.get("valueFrom", {}).get("configMapKeyRef", {})
    return config_maps.get(reference.get("name", ""), {}).get(reference.get("key", ""))


def _domains(pod: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the ends of its gang's DNS names, without and with the namespace."""
    subdomain = pod["spec"].get("subdomain")
    return (f".{subdomain}", f".{subdomain}.{pod['metadata']['namespace']}.svc") if subdomain else ()


def _here(value: str, domains: tuple[str, ...], directories: Mapping[str, str]) -> str:
    for inside, outside in directories.items():
        if value == inside or value.startswith(inside + "/"):
            return outside + value.removeprefix(inside)
    if value and all(name.endswith(domains) for name in value.split(",")):
        return ",".join(_LOOPBACK for _ in value.split(","))
    return value
