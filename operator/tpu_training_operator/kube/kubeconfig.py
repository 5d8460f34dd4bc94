"""Reads kubeconfigs with the `kubernetes` package, which runs their exec plugins.

The package takes 20 MiB of memory, so only a process that reads a kubeconfig imports this module.
"""

from typing import Any

from kubernetes import config
from kubernetes.client import Configuration
from yaml import YAMLError

UNUSABLE = (config.ConfigException, OSError, YAMLError, ValueError, TypeError, AttributeError, KeyError)
"""The errors for a kubeconfig that is missing or broken; the last four come from a file of another format."""


def contexts(file: str | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns all contexts, and the current one. Raises one of UNUSABLE."""
    all_and_current: tuple[list[dict[str, Any]], dict[str, Any]] = config.list_kube_config_contexts(file)
    return all_and_current


def configuration(file: str | None = None, context: str | None = None) -> Any:
    """Returns the configuration of a context (default: the current one) of `file` (default: KUBECONFIG). Raises one of
    UNUSABLE."""
    result = Configuration()
    config.load_kube_config(file, context, result)
    return result
