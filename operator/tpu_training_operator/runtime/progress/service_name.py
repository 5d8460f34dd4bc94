"""Where the progress service is reached: `--progress-service NAME.NAMESPACE`. Parsed by `main`."""

import re
from dataclasses import dataclass

# RFC 1035 labels for the Service, RFC 1123 ones for the namespace.
_FORM = re.compile(r"([a-z]([-a-z0-9]*[a-z0-9])?)\.([a-z0-9]([-a-z0-9]*[a-z0-9])?)")
_LONGEST_LABEL = 63


@dataclass(frozen=True)
class ServiceName:
    """The Kubernetes Service in front of the operator."""

    name: str
    namespace: str

    @staticmethod
    def parse(text: str) -> "ServiceName":
        """Raises ValueError, with a message for a person, unless the text is NAME.NAMESPACE."""
        found = _FORM.fullmatch(text)
        if found is None or max(map(len, text.split("."))) > _LONGEST_LABEL:
            raise ValueError(f"{text!r} is not NAME.NAMESPACE of a Service, such as tpu-training-operator.tpu-system")
        return ServiceName(found[1], found[3])

    def url(self, port: int) -> str:
        return f"https://{self.name}.{self.namespace}.svc:{port}"

    @property
    def dns_names(self) -> tuple[str, ...]:
        """What the certificate is for. localhost is what `kubectl port-forward` makes of the service."""
        host = f"{self.name}.{self.namespace}.svc"
        return (host, f"{host}.cluster.local", "localhost")

    @property
    def secret_name(self) -> str:
        return f"{self.name}-tls"
