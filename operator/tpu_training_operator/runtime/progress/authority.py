"""The authority's certificate and key, kept in a Secret of the operator's own namespace.

It must outlive the process: the workers of a running attempt trust what the operator before this one told them.
"""

import base64
import binascii
from datetime import datetime
from typing import Any, Protocol

from tpu_training_operator.api.constants import CA_CERTIFICATE_KEY
from tpu_training_operator.kube.cluster import SECRETS, Object, Resource
from tpu_training_operator.kube.errors import Conflict, NotFound
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
    """The Secret is not there, or holds something else. It is never overwritten; the message says what a person can
    do."""


class Secrets(Protocol):
    """What is asked of the cluster. Both methods raise ApiErrors."""

    async def get(self, resource: Resource, namespace: str, name: str) -> Object: ...

    async def update(self, body: Object) -> Object: ...


async def load_authority(cluster: Secrets, service: ServiceName, now: datetime) -> Authority:
    """The authority in the service's Secret, put there if it is empty. Raises BadSecret and ApiError.

    The chart makes the Secret: the right to update one can be bound to its name, the right to create one cannot. Two
    operators that start at once end up with the same authority: the second finds the Secret changed and reads it.
    """
    where = f"Secret {service.namespace}/{service.secret_name}"
    try:
        secret = await cluster.get(SECRETS, service.namespace, service.secret_name)
        if not secret.get("data") and not secret.get("immutable"):
            secret = await _filled(cluster, secret, new_authority(f"{service.name}.{service.namespace}", now).pem)
    except NotFound:
        raise BadSecret(f"{where} is missing; `helm upgrade` makes it, and the next start fills it") from None
    try:
        return read_authority(_key_pair(secret), now)
    except BadAuthority as error:
        raise BadSecret(
            f"{where}: {error}; delete it and run `helm upgrade`, and the next start makes a new authority (gangs that"
            " run by then report again from their next attempt on)"
        ) from None


async def _filled(cluster: Secrets, empty: Object, pem: KeyPair) -> Object:
    data = {
        CA_CERTIFICATE_KEY: base64.b64encode(pem.certificate).decode(),
        _PRIVATE_KEY: base64.b64encode(pem.key).decode(),
    }
    metadata = empty["metadata"]
    try:
        return await cluster.update({**empty, "kind": SECRETS.kind, "immutable": True, "data": data})
    except Conflict:
        return await cluster.get(SECRETS, metadata["namespace"], metadata["name"])


def _key_pair(secret: Object) -> KeyPair:
    data = secret.get("data") or {}
    return KeyPair(_decoded(data, CA_CERTIFICATE_KEY), _decoded(data, _PRIVATE_KEY))


def _decoded(data: dict[str, Any], key: str) -> bytes:
    try:
        return base64.b64decode(data[key], validate=True)
    except (KeyError, TypeError, binascii.Error):
        raise BadAuthority(f"no key {key}") from None
