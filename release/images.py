"""The two images, as archives in the OCI format, whose digest is known before any registry has them.

A registry gives an image the digest of its manifest. That is in the archive, so the chart can name the digest first and
the image be pushed later, by a tool that changes nothing on the way (docs/releasing.md).
"""

import hashlib
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from release.errors import ReleaseError
from release.source import Source

OPERATOR, TRAINER = "tpu-training-operator", "tpu-trainer"
DOCKERFILES = {OPERATOR: Path("operator/Dockerfile"), TRAINER: Path("trainer_image/Dockerfile")}

# As registries and Kubernetes have it: a host, perhaps a port, perhaps a path; in lower case.
_REGISTRY = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:\d{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*")


@dataclass(frozen=True)
class Image:
    """An image of this release. repository: with the registry, without a tag."""

    repository: str
    version: str
    archive: Path
    digest: str

    @property
    def pinned(self) -> str:
        return f"{self.repository}@{self.digest}"


Build = Callable[[Source, Path, str, Path], None]
"""Writes the image of a Dockerfile of the source, under a name with tag, as an OCI archive. Raises ReleaseError."""


def checked_registry(text: str) -> str:
    """Raises ReleaseError."""
    if not _REGISTRY.fullmatch(text):
        raise ReleaseError(
            f"REGISTRY: {text!r} is no name of a registry; right would be registry.example/team "
            "(lower case, without oci:// or https://, without / at the end)"
        )
    return text


def build_all(source: Source, registry: str, build: Build, into: Path) -> dict[str, Image]:
    """Returns the images by their short names. Raises ReleaseError."""
    into.mkdir()
    images = {}
    for name, dockerfile in DOCKERFILES.items():
        archive = into / f"{name}-{source.tag}.tar"
        repository = f"{registry}/{name}"
        build(source, dockerfile, f"{repository}:{source.tag}", archive)
        images[name] = Image(repository, source.tag, archive, digest_of(archive))
    return images


def digest_of(archive: Path) -> str:
    """Returns the digest under which a registry will know the archive's only image. Raises ReleaseError."""
    try:
        with tarfile.open(archive) as tar:
            manifests = json.loads(_member(tar, "index.json"))["manifests"]
            digests = {str(manifest["digest"]) for manifest in manifests}
            if len(digests) != 1:
                raise ReleaseError(f"{archive}: {len(digests)} images, where one is expected")
            [digest] = digests
            manifest = _member(tar, f"blobs/sha256/{digest.removeprefix('sha256:')}")
    except (OSError, tarfile.TarError, KeyError, ValueError) as error:
        raise ReleaseError(f"{archive}: no image in the OCI format ({error})") from error
    if digest != f"sha256:{hashlib.sha256(manifest).hexdigest()}":
        raise ReleaseError(f"{archive}: the manifest is not the one of {digest}; build the image again")
    return digest


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    """Reads a file of the archive: docker writes ./index.json, buildah index.json."""
    for spelling in (name, f"./{name}"):
        if spelling in tar.getnames():
            file = tar.extractfile(spelling)
            assert file is not None
            return file.read()
    raise KeyError(f"{name} is missing")


def builder(chosen: str, flags: tuple[str, ...]) -> Build:
    """Returns what builds images. `chosen`: docker, podman or buildah; empty for the first that answers. flags: more
    arguments for it.

    Raises ReleaseError.
    """
    tools = {"docker": _docker, "podman": _podman_or_buildah, "buildah": _podman_or_buildah}
    if chosen and chosen not in tools:
        raise ReleaseError(f"BUILDER: {chosen!r} is not one of {', '.join(tools)}")
    for tool in (chosen,) if chosen else tools:
        path = shutil.which(tool)
        if path and _answers(path, tool):
            return lambda *asked: tools[tool](path, flags, *asked)
    raise ReleaseError(
        f"{chosen or 'docker (with buildx), podman and buildah'}: not here, or without an answer to `info`. Install or "
        "start one, or say WITHOUT=images: the release then lacks them, and its chart names a tag and no digest"
    )


def _answers(path: str, tool: str) -> bool:
    questions = (["buildx", "version"], ["info"]) if tool == "docker" else (["info"],)
    return all(subprocess.run([path, *asked], capture_output=True, check=False).returncode == 0 for asked in questions)


def _docker(path: str, flags: tuple[str, ...], source: Source, dockerfile: Path, name: str, archive: Path) -> None:
    output = f"--output=type=oci,dest={archive},rewrite-timestamp=true"
    # With provenance the manifest would be that of a list, and another one with each build.
    reproducible = ("--provenance=false", f"--build-arg=SOURCE_DATE_EPOCH={source.epoch}", _version(source))
    _run(path, "buildx", "build", f"--file={source.tree / dockerfile}", f"--tag={name}", output, *reproducible, *flags,
         str(source.tree))  # fmt: skip


def _podman_or_buildah(
    path: str, flags: tuple[str, ...], source: Source, dockerfile: Path, name: str, archive: Path
) -> None:
    file = f"--file={source.tree / dockerfile}"
    _run(path, "build", "--format=oci", f"--timestamp={source.epoch}", file, f"--tag={name}", _version(source), *flags,
         str(source.tree))  # fmt: skip
    _run(path, "push", name, f"oci-archive:{archive}:{name}")


def _version(source: Source) -> str:
    return f"--build-arg=VERSION={source.version}"


def _run(path: str, *arguments: str) -> None:
    """Runs a tool that prints to the terminal. Raises ReleaseError."""
    status = subprocess.run([path, *arguments], check=False).returncode
    if status != 0:
        raise ReleaseError(f"{Path(path).name} {arguments[0]} ended with {status}; its reason is above")
