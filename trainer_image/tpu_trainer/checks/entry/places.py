"""Finds out where the job's buckets are, and where this machine is.

The operator has neither the job's rights nor its network. So the entry check asks the storage as the job, and leaves
the answers in its termination message; the operator judges them.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tpu_contract.run_spec import RunSpec

_STORAGE = "https://storage.googleapis.com"
_FIELDS = "fields=location,locationType,customPlacementConfig"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_only"
_ZONE = "http://metadata.google.internal/computeMetadata/v1/instance/zone"
_SECONDS = 10.0
_MOST = 8
_LONGEST = 160

_TROUBLES = {401: "identity", 403: "denied", 404: "missing"}
_UNAVAILABLE = "unavailable"

Ask = Callable[[str, Mapping[str, str]], Any]
"""Returns what a URL answers to a request with headers; raises OSError, of which HTTPError is one, or ValueError."""


def find_places(spec: RunSpec) -> Mapping[str, Any]:
    """Returns `buckets`, each with its name and its location, or why that is not known, and `zone`, this machine's, ""
    if it does not know; nothing for a job without buckets."""
    names = list(dict.fromkeys(_buckets(spec)))[:_MOST]
    if not names:
        return {}
    headers, trouble = _identity()
    buckets = [{"name": name, **(trouble or _location(name, headers, _ask))} for name in names]
    return {"buckets": buckets, "zone": "" if os.environ.get("STORAGE_EMULATOR_HOST") else _zone(_ask)}


def _buckets(spec: RunSpec) -> Iterator[str]:
    checkpoint = spec.checkpoint
    uris = [spec.data_uri, spec.report.uri]
    if checkpoint is not None:
        initial = None if checkpoint.init_from is None else checkpoint.init_from.uri
        uris += [checkpoint.uri, checkpoint.resume_from, initial]
    for uri in uris:
        if uri is not None and uri.startswith("gs://"):
            yield uri.removeprefix("gs://").partition("/")[0]


def _identity() -> tuple[dict[str, str], dict[str, str] | None]:
    """Returns the headers of a request, or why there are none."""
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        return {}, None
    from google.auth import default
    from google.auth.exceptions import GoogleAuthError, TransportError
    from google.auth.transport.requests import Request

    try:
        credentials, _ = default(scopes=[_SCOPE])
        credentials.refresh(Request())  # type: ignore[no-untyped-call]
    except TransportError as error:
        return {}, _trouble(_UNAVAILABLE, error)
    except GoogleAuthError as error:
        return {}, _trouble("identity", error)
    return {"Authorization": f"Bearer {credentials.token}"}, None


def _location(bucket: str, headers: Mapping[str, str], ask: Ask) -> dict[str, Any]:
    server = os.environ.get("STORAGE_EMULATOR_HOST") or _STORAGE
    try:
        answer = ask(f"{server}/storage/v1/b/{bucket}?{_FIELDS}", headers)
        placement = answer.get("customPlacementConfig") or {}
        regions = [str(region).lower() for region in placement.get("dataLocations") or ()]
        return {"location": str(answer["location"]).lower(), **({"regions": regions} if regions else {})}
    except urllib.error.HTTPError as error:
        return _trouble(_TROUBLES.get(error.code, _UNAVAILABLE), error)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return _trouble(_UNAVAILABLE, error)


def _zone(ask: Ask) -> str:
    try:
        # projects/123/zones/us-central1-b
        return str(ask(_ZONE, {"Metadata-Flavor": "Google"})).rpartition("/")[2]
    except (OSError, ValueError):
        return ""


def _ask(url: str, headers: Mapping[str, str]) -> Any:
    request = urllib.request.Request(url, headers=dict(headers))  # noqa: S310 - its scheme is written above
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:  # noqa: S310
        body: str = answer.read(1 << 16).decode()
    return json.loads(body) if body.startswith("{") else body


def _trouble(kind: str, error: Exception) -> dict[str, str]:
    message = " ".join(str(error).split()) or type(error).__name__
    return {"trouble": kind, "said": message[:_LONGEST]}
