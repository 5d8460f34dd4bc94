"""Credentials for the API server: from the pod's service account or a kubeconfig, read by the `kubernetes` package.

The operator prefers the service account, a command at a prompt the kubeconfig, as kubectl does.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes import config
from kubernetes.client import Configuration
from kubernetes.config import incluster_config
from yaml import YAMLError

_SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
# What the library raises for a kubeconfig that is missing or broken; the last four for a file of another form.
_UNUSABLE = (config.ConfigException, OSError, YAMLError, ValueError, TypeError, AttributeError, KeyError)


class NoCredentials(Exception):
    """Neither a service account nor a usable kubeconfig; the message says which files were tried."""


@dataclass(frozen=True)
class Credentials:
    """A server and how to authenticate to it. `namespace` is the default namespace of the context."""

    configuration: Any
    namespace: str = "default"

    @property
    def server(self) -> str:
        return str(self.configuration.host)

    @property
    def ca_file(self) -> str | None:
        return self.configuration.ssl_ca_cert or None

    @property
    def client_certificate(self) -> tuple[str, str] | None:
        certificate, key = self.configuration.cert_file, self.configuration.key_file
        return (certificate, key) if certificate and key else None

    def authorization(self) -> str | None:
        """The value of the Authorization header, read again on every call because bound tokens rotate.

        May read a file or run an exec plugin, so do not call it on the event loop.
        """
        settings: dict[str, dict[str, str]] = self.configuration.auth_settings()
        return settings.get("BearerToken", {}).get("value")

    def ssl_context(self) -> ssl.SSLContext | bool:
        if not self.configuration.verify_ssl:
            return False
        context = ssl.create_default_context(cafile=self.ca_file)
        if self.client_certificate:
            context.load_cert_chain(*self.client_certificate)
        return context


def load_credentials() -> Credentials:
    """For the operator: the service account in a pod, else the current context of KUBECONFIG. Raises NoCredentials."""
    configuration = Configuration()
    if not _is_in_pod(configuration):
        try:
            config.load_kube_config(client_configuration=configuration)
        except _UNUSABLE as error:
            raise NoCredentials(
                f"no service account token in this pod, and no usable kubeconfig: {_one_line(error)}"
            ) from None
    return Credentials(configuration)


def load_personal_credentials(kubeconfig: Path | None = None, context: str | None = None) -> Credentials:
    """For a command at a prompt: the kubeconfig (default: KUBECONFIG) and its context (default: the current one).
    Without either, the service account of this pod. Raises NoCredentials."""
    file = None if kubeconfig is None else str(kubeconfig)
    configuration = Configuration()
    try:
        if kubeconfig is not None:
            # The library reports an unreadable file as a missing configuration.
            kubeconfig.open("rb").close()
        contexts, current = config.list_kube_config_contexts(file)
        chosen = current if context is None else next((c for c in contexts if c["name"] == context), None)
        if chosen is None:
            names = ", ".join(sorted(c["name"] for c in contexts))
            raise NoCredentials(f"the kubeconfig has no context {context!r}; it has: {names}")
        config.load_kube_config(file, context, configuration)
        return Credentials(configuration, chosen["context"].get("namespace") or "default")
    except _UNUSABLE as error:
        if kubeconfig is None and context is None and _is_in_pod(configuration):
            return Credentials(configuration, _SERVICE_ACCOUNT_NAMESPACE.read_text(encoding="utf-8").strip())
        name = "" if kubeconfig is None else f"{kubeconfig}: "
        raise NoCredentials(f"no usable kubeconfig: {name}{_one_line(error).rstrip('.')}") from None


def _is_in_pod(configuration: Any) -> bool:
    """Fills `configuration` from the service account, if there is one."""
    try:
        config.load_incluster_config(configuration)
    except config.ConfigException:
        return False
    # The library caches a token for a minute, even one that the server refused.
    configuration.refresh_api_key_hook = _read_token
    return True


def _read_token(configuration: Any) -> None:
    token = Path(incluster_config.SERVICE_TOKEN_FILENAME).read_text(encoding="utf-8")
    configuration.api_key["BearerToken"] = f"Bearer {token.strip()}"


def _one_line(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())
