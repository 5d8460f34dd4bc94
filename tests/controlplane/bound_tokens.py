"""Tokens bound to pods, as the kubelet requests them, and copies of them with other claims, signed with the cluster's
own key."""

import base64
import json
from typing import Any

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from tests.cluster.control_plane import ControlPlane

AUDIENCE = "tpu-operator.dev/progress"
# The least that the API server grants.
_SECONDS = 600
_P256_BYTES = 32


def token(cluster: ControlPlane, namespace: str, pod: dict[str, Any] | None, audience: str = AUDIENCE) -> str:
    """A token of the service account `default` for the audience, bound to the pod if one is given."""
    spec: dict[str, Any] = {"audiences": [audience], "expirationSeconds": _SECONDS}
    if pod is not None:
        metadata = pod["metadata"]
        spec["boundObjectRef"] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": metadata["name"],
            "uid": metadata["uid"],
        }
    answer = cluster.api.call(
        "POST",
        f"/api/v1/namespaces/{namespace}/serviceaccounts/default/token",
        {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec},
    )
    return str(answer["status"]["token"])


def with_claims(cluster: ControlPlane, genuine: str, **claims: Any) -> str:
    """The genuine token with some claims replaced and a valid signature."""
    header, payload, _ = genuine.split(".")
    changed = json.loads(_decoded(payload)) | claims
    signed = f"{header}.{_encoded(json.dumps(changed).encode())}"
    key = serialization.load_pem_private_key((cluster.directory / "service-account.key").read_bytes(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    r, s = decode_dss_signature(key.sign(signed.encode(), ec.ECDSA(hashes.SHA256())))
    return f"{signed}.{_encoded(r.to_bytes(_P256_BYTES, 'big') + s.to_bytes(_P256_BYTES, 'big'))}"


def claims(genuine: str) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(_decoded(genuine.split(".")[1]))
    return decoded


def _decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()
