"""Kubeconfigs, read by the `kubernetes` package, with their exec plugins.

The package takes 26 MiB of memory, so only a process that reads a kubeconfig imports this module.
"""

from typing import Any

from kubernetes import config
from kubernetes.client import Configuration
from yaml import YAMLError

UNUSABLE = (config.ConfigException, OSError, YAMLError, ValueError, TypeError, AttributeError, KeyError)
"""What the package raises for a kubeconfig that is missing or broken; the last four for a file of another form."""


def contexts(file: str | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All contexts, and the current one. Raises one of UNUSABLE."""
    found: tuple[list[dict[str, Any]], dict[str, Any]] = config.list_kube_config_contexts(file)
    return found


def configuration(file: str | None = None, context: str | None = None) -> Any:
    """`file`: default KUBECONFIG; `context`: default the current one. Raises one of UNUSABLE."""
    loaded = Configuration()
    config.load_kube_config(file, context, loaded)
    return loaded
