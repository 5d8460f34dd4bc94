"""Writes images as OCI archives without any tool or registry: layers and one configuration.

https://github.com/opencontainers/image-spec/blob/v1.1.0/image-layout.md
"""

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"

# uname -m -> the name that Go and the image format use.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}

Layer = dict[str, object]
"""The descriptor of one, as manifests have it."""

PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"


def write_image(
    archive: Path, name: str, layers: Sequence[Path], settings: Mapping[str, object], on: Sequence[Layer] = ()
) -> None:
    """Writes the archive of an image; its layers, lowest first, are uncompressed tar files.

    name: with registry and tag; containerd imports the image under it. settings: how its container starts, such as
    Entrypoint. on: layers below these that the archive leaves out, because the nodes have them.
    """
    described = [*on, *(_descriptor(LAYER, layer) for layer in layers)]
    config = json.dumps(
        {
            "architecture": ARCHITECTURES[platform.machine()],
            "os": "linux",
            "config": {"Env": [f"PATH={PATH}"], **settings},
            "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer in described]},
            # buildah builds in layers only on an image that has one entry for each.
            "history": [{"created_by": name}] * len(described),
        }
    ).encode()
    with tarfile.open(archive, "w") as tar:
        _add_index(tar, name, config, described)
        for layer, description in zip(layers, described[len(on) :], strict=True):
            tar.add(layer, _blob_path(str(description["digest"])))


def rewrite_image(made: Path, archive: Path, name: str, on: Sequence[Layer]) -> None:
    """Writes an archive in docker's form again, as `write_image` would, without the layers in `on`."""
    left_out = [layer["digest"] for layer in on]
    with tarfile.open(made) as source, tarfile.open(archive, "w") as tar:
        [image] = json.loads(_read(source, "manifest.json"))
        config = _read(source, image["Config"])
        members = [source.getmember(member) for member in image["Layers"]]
        layers = [
            {"mediaType": LAYER, "digest": digest, "size": member.size}
            for digest, member in zip(json.loads(config)["rootfs"]["diff_ids"], members, strict=True)
        ]
        _add_index(tar, name, config, layers)
        for layer, member in zip(layers, members, strict=True):
            if layer["digest"] not in left_out:
                entry = tarfile.TarInfo(_blob_path(str(layer["digest"])))
                entry.size = member.size
                tar.addfile(entry, source.extractfile(member))


def write_program_image(archive: Path, name: str, program: Path) -> None:
    """Writes the archive of an image that holds one static program and runs it."""
    layer = archive.with_suffix(".layer")
    with tarfile.open(layer, "w") as tar:
        _add(tar, program.name, program.read_bytes())
    write_image(archive, name, [layer], {"Entrypoint": [f"/{program.name}"]})
    layer.unlink()


def write_folder_layer(layer: Path, folder: str) -> None:
    """Writes a layer in which everybody may enter the folder."""
    with tarfile.open(layer, "w") as tar:
        entry = tarfile.TarInfo(folder)
        entry.type, entry.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(entry)


def layers_of(archive: Path) -> list[Layer]:
    """The layers of an archive that `write_image` has written."""
    with tarfile.open(archive) as tar:
        [manifest] = json.loads(_read(tar, "index.json"))["manifests"]
        found: list[Layer] = json.loads(_read(tar, _blob_path(manifest["digest"])))["layers"]
        return found


def _add_index(tar: tarfile.TarFile, name: str, config: bytes, layers: Sequence[Layer]) -> None:
    """Adds all of an image but its layers."""
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": _descriptor(CONFIG, config),
            "layers": layers,
        }
    ).encode()
    named = _descriptor(MANIFEST, manifest) | {"annotations": {"io.containerd.image.name": name}}
    _add(tar, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
    _add(tar, "index.json", json.dumps({"schemaVersion": 2, "manifests": [named]}).encode())
    for blob in (config, manifest):
        _add(tar, _blob_path(_digest(blob)), blob)


def _read(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    return file.read()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o755
    tar.addfile(entry, io.BytesIO(content))


def _descriptor(media_type: str, blob: bytes | Path) -> Layer:
    size = len(blob) if isinstance(blob, bytes) else blob.stat().st_size
    return {"mediaType": media_type, "digest": _digest(blob), "size": size}


def _digest(blob: bytes | Path) -> str:
    if isinstance(blob, bytes):
        return f"sha256:{hashlib.sha256(blob).hexdigest()}"
    with blob.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _blob_path(digest: str) -> str:
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"
