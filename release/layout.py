"""The chart in the form in which a registry serves it: an OCI layout with one artifact, as `helm push` would send it.

helm itself reads charts from registries only (`oci://`), not from a folder; tools such as skopeo and oras copy a layout
into a registry as it is.

https://github.com/opencontainers/image-spec/blob/v1.1.0/image-layout.md
"""

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from release import chart

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.cncf.helm.config.v1+json"
CONTENT = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"


def write(archive: Path, epoch: int, into: Path) -> str:
    """Writes the layout into the folder, which must not exist. Returns the artifact's digest."""
    about = chart.metadata(archive)
    blobs = into / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    annotations = {
        "org.opencontainers.image.created": datetime.fromtimestamp(epoch, UTC).isoformat(),
        "org.opencontainers.image.description": about["description"],
        "org.opencontainers.image.title": about["name"],
        "org.opencontainers.image.version": about["version"],
    }
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": _blob(blobs, CONFIG, _json(about)),
            "layers": [_blob(blobs, CONTENT, archive.read_bytes())],
            "annotations": annotations,
        }
    )
    described = _blob(blobs, MANIFEST, manifest)
    named = {**described, "annotations": {"org.opencontainers.image.ref.name": about["version"]}}
    (into / "oci-layout").write_bytes(_json({"imageLayoutVersion": "1.0.0"}))
    (into / "index.json").write_bytes(_json({"schemaVersion": 2, "manifests": [named]}))
    return str(described["digest"])


def _blob(blobs: Path, media_type: str, content: bytes) -> dict[str, Any]:
    name = hashlib.sha256(content).hexdigest()
    (blobs / name).write_bytes(content)
    return {"mediaType": media_type, "digest": f"sha256:{name}", "size": len(content)}


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
