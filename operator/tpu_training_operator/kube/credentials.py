"""Credentials for the API server: of the pod's service account or from a kubeconfig.

The operator prefers the service account; a command at a prompt prefers the kubeconfig, as kubectl does.
"""

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class NoCredentials(Exception):
    """There is neither a service account nor a usable kubeconfig; the message says which files were tried."""


@dataclass(frozen=True)
class Credentials:
    """A server and the way to authenticate to it. `namespace`: the default namespace of the context."""

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
        """Returns the value of the Authorization header. Each call reads it again, because bound tokens rotate.

        It may read a file or run an exec plugin, so it must not be called on the event loop.
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


@dataclass(frozen=True)
class _InPod:
    """The contents of a kubeconfig, from the files and variables that every pod has."""

    host: str
    ssl_ca_cert: str
    cert_file: None = None
    key_file: None = None
    verify_ssl: bool = True

    def auth_settings(self) -> dict[str, dict[str, str]]:
        token = (_SERVICE_ACCOUNT / "token").read_text(encoding="utf-8")
        return {"BearerToken": {"value": f"Bearer {token.strip()}"}}


def load_credentials() -> Credentials:
    """Returns the operator's credentials: of the service account in a pod, else of the current context of KUBECONFIG.
    Raises NoCredentials."""
    if in_pod := _in_pod():
        return Credentials(in_pod)
    try:
        from tpu_training_operator.kube import kubeconfig
    except ModuleNotFoundError:
        # The operator's image cannot read one.
        raise NoCredentials("no service account token in this pod") from None
    try:
        return Credentials(kubeconfig.configuration())
    except kubeconfig.UNUSABLE as error:
        raise NoCredentials(
            f"no service account token in this pod, and no usable kubeconfig: {_one_line(error)}"
        ) from None


def load_personal_credentials(file: Path | None = None, context: str | None = None) -> Credentials:
    """Returns the credentials of a command at a prompt: of a context (default: the current one) of a kubeconfig
    (default: KUBECONFIG), or of the service account of this pod if neither is named. Raises NoCredentials."""
    try:
        from tpu_training_operator.kube import kubeconfig
    except ModuleNotFoundError:
        # The operator's image cannot read one.
        if file is None and context is None and (in_pod := _in_pod()):
            return Credentials(in_pod, _pod_namespace())
        raise NoCredentials("no service account token in this pod, and no package that reads a kubeconfig") from None
    path = None if file is None else str(file)
    try:
        if file is not None:
            # The library reports an unreadable file as a missing configuration.
            file.open("rb").close()
        contexts, current = kubeconfig.contexts(path)
        chosen = current if context is None else next((c for c in contexts if c["name"] == context), None)
        if chosen is None:
            names = ", ".join(sorted(c["name"] for c in contexts))
            raise NoCredentials(f"the kubeconfig has no context {context!r}; it has: {names}")
        configuration = kubeconfig.configuration(path, context)
        return Credentials(configuration, chosen["context"].get("namespace") or "default")
    except kubeconfig.UNUSABLE as error:
        if file is None and context is None and (in_pod := _in_pod()):
            return Credentials(in_pod, _pod_namespace())
        name = "" if file is None else f"{file}: "
        raise NoCredentials(f"no usable kubeconfig: {name}{_one_line(error).rstrip('.')}") from None


def _in_pod() -> _InPod | None:
    """Returns the files of this pod's service account; None outside of a pod, or without a token."""
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}") for name in ("HOST", "PORT"))
    token, certificate = (_SERVICE_ACCOUNT / name for name in ("token", "ca.crt"))
    if not host or not port or not all(file.is_file() and file.stat().st_size for file in (token, certificate)):
        return None
    return _InPod(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}", str(certificate))


def _pod_namespace() -> str:
    return (_SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()


def _one_line(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())
