"""Who we are at the API server: from the pod's service account or the kubeconfig, by the `kubernetes` package.

Used by `main` for kopf's watches and by `runtime.kubernetes_cluster` for everything else; for a person at a prompt by
`tpujob`.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes import config
from kubernetes.client import Configuration
from kubernetes.config import incluster_config
from yaml import YAMLError


class NoCredentials(Exception):
    """Neither a service account nor a usable kubeconfig; the message says what was looked for."""


_SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True)
class Credentials:
    """A server and the way to prove oneself to it. Tokens are read anew on every use: bound tokens rotate.

    `namespace`: where somebody works who names none.
    """

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
        """The value of the Authorization header. May read a file or run an exec plugin: not for the event loop."""
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
    """In a pod the service account, elsewhere the current context of KUBECONFIG. Raises NoCredentials."""
    configuration = Configuration()
    try:
        config.load_incluster_config(configuration)
        # By itself the library keeps a token for a minute, be it refused or not.
        configuration.refresh_api_key_hook = _read_token
    except config.ConfigException:
        try:
            config.load_kube_config(client_configuration=configuration)
        except (config.ConfigException, OSError, YAMLError, ValueError, TypeError, AttributeError) as error:
            # The last three: the file is there, but is no kubeconfig.
            what = " ".join(str(error).split())
            raise NoCredentials(f"no service account token in this pod, and no usable kubeconfig: {what}") from None
    return Credentials(configuration)


def _read_token(configuration: Any) -> None:
    token = Path(incluster_config.SERVICE_TOKEN_FILENAME).read_text(encoding="utf-8")
    configuration.api_key["BearerToken"] = f"Bearer {token.strip()}"


def load_personal_credentials(kubeconfig: Path | None = None, context: str | None = None) -> Credentials:
    """As kubectl finds them: the kubeconfig first, by default that of KUBECONFIG, and in it the context, by default the
    current one; without either, the service account of this pod. Raises NoCredentials."""
    file = None if kubeconfig is None else str(kubeconfig)
    configuration = Configuration()
    try:
        if kubeconfig is not None:
            # The library says of a file that it cannot read that there is no configuration.
            kubeconfig.open("rb").close()
        contexts, current = config.list_kube_config_contexts(file)
        chosen = current if context is None else next((c for c in contexts if c["name"] == context), None)
        if chosen is None:
            names = ", ".join(sorted(c["name"] for c in contexts))
            raise NoCredentials(f"there is no context {context!r} in the kubeconfig; there are: {names}")
        config.load_kube_config(file, context, configuration)
        return Credentials(configuration, chosen["context"].get("namespace") or "default")
    except (config.ConfigException, OSError, YAMLError, ValueError, TypeError, AttributeError, KeyError) as error:
        if kubeconfig is None and context is None and _is_in_pod(configuration):
            return Credentials(configuration, _SERVICE_ACCOUNT_NAMESPACE.read_text(encoding="utf-8").strip())
        what = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        name = "" if kubeconfig is None else f"{kubeconfig}: "
        raise NoCredentials(f"no usable kubeconfig: {name}{' '.join(what.split()).rstrip('.')}") from None


def _is_in_pod(configuration: Any) -> bool:
    try:
        config.load_incluster_config(configuration)
    except config.ConfigException:
        return False
    return True
