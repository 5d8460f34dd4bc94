"""Writes images as OCI archives without any tool or registry: one layer, one configuration.

https://github.com/opencontainers/image-spec/blob/v1.1.0/image-layout.md
"""

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"

# uname -m -> the name that Go and the image format use.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def write_image(archive: Path, name: str, layer: Path, command: tuple[str, ...]) -> None:
    """Writes the archive of an image with one layer, an uncompressed tar file.

    name: with registry and tag; containerd imports the image under it. command: its entrypoint.
    """
    config = json.dumps(
        {
            "architecture": ARCHITECTURES[platform.machine()],
            "os": "linux",
            "config": {"Entrypoint": command, "Env": ["PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"]},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    ).encode()
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": _descriptor(CONFIG, config),
            "layers": [_descriptor(LAYER, layer)],
        }
    ).encode()
    named = _descriptor(MANIFEST, manifest) | {"annotations": {"io.containerd.image.name": name}}
    with tarfile.open(archive, "w") as tar:
        _add(tar, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
        _add(tar, "index.json", json.dumps({"schemaVersion": 2, "manifests": [named]}).encode())
        for blob in (config, manifest):
            _add(tar, _blob_path(_digest(blob)), blob)
        tar.add(layer, _blob_path(_digest(layer)))


def write_program_image(archive: Path, name: str, program: Path) -> None:
    """Writes the archive of an image that holds one static program and runs it."""
    layer = archive.with_suffix(".layer")
    with tarfile.open(layer, "w") as tar:
        _add(tar, program.name, program.read_bytes())
    write_image(archive, name, layer, (f"/{program.name}",))
    layer.unlink()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o755
    tar.addfile(entry, io.BytesIO(content))


def _descriptor(media_type: str, blob: bytes | Path) -> dict[str, object]:
    size = len(blob) if isinstance(blob, bytes) else blob.stat().st_size
    return {"mediaType": media_type, "digest": _digest(blob), "size": size}


def _digest(blob: bytes | Path) -> str:
    if isinstance(blob, bytes):
        return f"sha256:{hashlib.sha256(blob).hexdigest()}"
    with blob.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _blob_path(digest: str) -> str:
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"
