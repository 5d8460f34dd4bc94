"""Who we are at the API server: from the pod's service account or the kubeconfig, by the `kubernetes` package.

Used by `main` for kopf's watches and by `runtime.kubernetes_cluster` for everything else.
"""

import ssl
from dataclasses import dataclass
from typing import Any

from kubernetes import config
from kubernetes.client import Configuration
from yaml import YAMLError


class NoCredentials(Exception):
    """Neither a service account nor a usable kubeconfig; the message says what was looked for."""


@dataclass(frozen=True)
class Credentials:
    """A server and the way to prove oneself to it. Tokens are read anew on every use: bound tokens rotate."""

    configuration: Any

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
    except config.ConfigException:
        try:
            config.load_kube_config(client_configuration=configuration)
        except (config.ConfigException, OSError, YAMLError, ValueError, TypeError, AttributeError) as error:
            # The last three: the file is there, but is no kubeconfig.
            what = " ".join(str(error).split())
            raise NoCredentials(f"no service account token in this pod, and no usable kubeconfig: {what}") from None
    return Credentials(configuration)
