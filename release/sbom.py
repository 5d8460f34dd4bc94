"""What a release is made of: every package that its constraints pin, as a CycloneDX document.

The packages of the operator's image are `required`, those that pyproject.toml's extras bring to their users `optional`,
and what only develops and tests the project `excluded`. What constraints.torch_tpu.txt alone pins is the trainer's
second stack, and `optional`. Licences and dependencies are those that packages in this environment declare; of a
package that is not installed in that version, the document says neither.

https://cyclonedx.org/docs/1.6/json/
"""

import importlib.metadata
import json
import re
import tomllib
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from release.errors import ReleaseError
from release.licenses import license_of
from release.source import Source

# The extras that are for people who use the project.
FOR_USERS = ("trainer", "gcs", "examples", "aot")
PINS, SECOND_STACK = "constraints.txt", "constraints.torch_tpu.txt"
NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "tpu-operator.dev")


@dataclass(frozen=True)
class Pin:
    """One package of a file of constraints. hashes: SHA-256 of each of its files. marker: where it is installed, or
    empty."""

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]

    @property
    def purl(self) -> str:
        return f"pkg:pypi/{self.name}@{quote(self.version, safe='')}"


def document(source: Source) -> str:
    """Raises ReleaseError."""
    pins = pinned(source, PINS)
    known = {pin.purl for pin in pins}
    second = [pin for pin in pinned(source, SECOND_STACK) if pin.purl not in known]
    project = tomllib.loads(source.read("pyproject.toml"))["project"]
    required = {pin.name for pin in pinned(source, "operator/requirements.txt")}
    extras = project["optional-dependencies"]
    optional = _dependencies(requirement for name in FOR_USERS for requirement in extras[name])
    scopes = {name: "required" if name in required else "optional" for name in required | optional}
    root = {
        "type": "application",
        "bom-ref": project["name"],
        "name": project["name"],
        "version": source.version,
        "description": project["description"],
        "licenses": [{"license": {"id": project["license"]}}],
    }
    direct = {canonicalize_name(Requirement(text).name) for text in project["dependencies"]}
    body = {
        "metadata": {"timestamp": datetime.fromtimestamp(source.epoch, UTC).isoformat(), "component": root},
        "components": [
            *(_component(pin, scopes.get(pin.name, "excluded")) for pin in pins),
            *(_component(pin, "optional", stack="torch_tpu") for pin in second),
        ],
        "dependencies": [
            _edges(project["name"], direct, pins),
            *(_edges_of(pin, pins) for pin in pins if _declared(pin)),
        ],
    }
    content = json.dumps(body, sort_keys=True)
    head = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        # The same content has the same number.
        "serialNumber": f"urn:uuid:{uuid.uuid5(NAMESPACE, content)}",
        "version": 1,
    }
    return json.dumps(head | body, indent=1) + "\n"


def pinned(source: Source, path: str) -> list[Pin]:
    """Returns the entries of a file that `make lock` has written. Raises ReleaseError."""
    pins = []
    for entry in re.split(r"\n(?=\S)", source.read(path).strip()):
        found = re.match(r"([a-z0-9.-]+)==(\S+?)(?: ; (.+?))?(?: \\)?(?:\n|$)", entry)
        hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})\b", entry)
        if found is None or not hashes:
            raise ReleaseError(f"{path}: no pin with hashes in {entry[:60]!r}; write it with `make lock`")
        pins.append(Pin(found[1], found[2], found[3] or "", tuple(hashes)))
    return pins


def _component(pin: Pin, scope: str, stack: str = "") -> dict[str, Any]:
    """Returns the component with the hashes of all its files; an installation takes the one for its machine. stack:
    the only one that has this package."""
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": pin.purl,
        "name": pin.name,
        "version": pin.version,
        "scope": scope,
        "purl": pin.purl,
        "externalReferences": [
            {
                "type": "distribution",
                "url": pin.purl,
                "hashes": [{"alg": "SHA-256", "content": content} for content in pin.hashes],
            }
        ],
    }
    properties = {"marker": pin.marker, "stack": stack}
    if (declared := _declared(pin)) is None:
        # No licence in the document means that nobody looked.
        properties["license"] = "not installed in the environment that made this document"
    else:
        component["licenses"] = [license_of(declared)]
    if named := [{"name": f"tpu-operator.dev:{name}", "value": value} for name, value in properties.items() if value]:
        component["properties"] = named
    return component


def _declared(pin: Pin) -> importlib.metadata.PackageMetadata | None:
    try:
        found = importlib.metadata.distribution(pin.name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return found.metadata if found.version == pin.version else None


def _edges_of(pin: Pin, pins: list[Pin]) -> dict[str, Any]:
    return _edges(pin.purl, _needs(pin.name, frozenset()), pins)


def _edges(ref: str, names: Iterable[str], pins: list[Pin]) -> dict[str, Any]:
    wanted = set(names)
    return {"ref": ref, "dependsOn": sorted(pin.purl for pin in pins if pin.name in wanted)}


def _dependencies(requirements: Iterable[str]) -> set[str]:
    """Returns the names of everything that these requirements depend on."""
    reached: dict[str, frozenset[str]] = {}
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        wanted = waiting.pop()
        name, extras = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if name in reached and extras <= reached[name]:
            continue
        reached[name] = reached.get(name, frozenset()) | extras
        waiting += _requirements(name, reached[name])
    return set(reached)


def _needs(name: str, extras: frozenset[str]) -> set[str]:
    return {canonicalize_name(wanted.name) for wanted in _requirements(name, extras)}


def _requirements(name: str, extras: frozenset[str]) -> list[Requirement]:
    """Returns what the installed package requires on this platform; nothing if it is not installed."""
    try:
        texts = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    asked: list[Mapping[str, str]] = [{"extra": extra} for extra in extras] or [{"extra": ""}]
    found = [Requirement(text) for text in texts]
    return [one for one in found if one.marker is None or any(one.marker.evaluate(dict(extra)) for extra in asked)]
