"""The authority's certificate and key, kept in a Secret of the operator's own namespace. Called by `main` at the start.

It must outlive the process: the workers of a running attempt trust what the operator before this one told them.
"""

import base64
import binascii
from datetime import datetime
from typing import Any

from tpu_training_operator.api.constants import CA_CERTIFICATE_KEY, MANAGER
from tpu_training_operator.runtime.cluster import SECRETS, AlreadyExists, Cluster, NotFound, Object
from tpu_training_operator.runtime.progress.certificates import (
    Authority,
    BadAuthority,
    KeyPair,
    new_authority,
    read_authority,
)
from tpu_training_operator.runtime.progress.service_name import ServiceName

_PRIVATE_KEY = "ca.key"


class BadSecret(Exception):
    """The Secret holds something else. It is never overwritten; the message says what a person can do."""


async def load_authority(cluster: Cluster, service: ServiceName, now: datetime) -> Authority:
    """The authority in the service's Secret, made if there is none. Raises BadSecret and ApiError.

    Two operators that start at once end up with the same one: the second finds the name taken and reads.
    """
    try:
        secret = await cluster.get(SECRETS, service.namespace, service.secret_name)
    except NotFound:
        fresh = new_authority(f"{service.name}.{service.namespace}", now)
        try:
            secret = await cluster.create(_secret(service, fresh.pem))
        except AlreadyExists:
            secret = await cluster.get(SECRETS, service.namespace, service.secret_name)
    try:
        return read_authority(_key_pair(secret), now)
    except BadAuthority as error:
        raise BadSecret(
            f"Secret {service.namespace}/{service.secret_name}: {error}; delete it, and a new one is made at the next"
            " start (gangs that run by then report again from their next attempt on)"
        ) from None


def _secret(service: ServiceName, pem: KeyPair) -> Object:
    return {
        "apiVersion": SECRETS.api_version,
        "kind": SECRETS.kind,
        "metadata": {
            "name": service.secret_name,
            "namespace": service.namespace,
            "labels": {"app.kubernetes.io/managed-by": MANAGER},
        },
        "type": "Opaque",
        "immutable": True,
        "data": {
            CA_CERTIFICATE_KEY: base64.b64encode(pem.certificate).decode(),
            _PRIVATE_KEY: base64.b64encode(pem.key).decode(),
        },
    }


def _key_pair(secret: Object) -> KeyPair:
    data = secret.get("data") or {}
    return KeyPair(_decoded(data, CA_CERTIFICATE_KEY), _decoded(data, _PRIVATE_KEY))


def _decoded(data: dict[str, Any], key: str) -> bytes:
    try:
        return base64.b64decode(data[key], validate=True)
    except (KeyError, TypeError, binascii.Error):
        raise BadAuthority(f"no key {key}") from None
