"""Images for real nodes, made on this machine alone: a base image by debootstrap, and Dockerfiles built on it.

`python -m tests.cluster.images` makes the base image; run first, it keeps that minute out of the tests. This needs no
daemon and no image registry: the base comes from Debian's package archive once and is cached, and so are the layers of
a Dockerfile that stay the same.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import directories, oci, packages
from tests.cluster.processes import launched

SUITE = "bookworm"
# What the project's Dockerfiles expect of python:3.11-slim.
CONTENTS = ("python3", "python3-venv", "ca-certificates")
# The form of `oci.write_image`'s archives.
FORM = "2"
# Files that only apt needs, and devices that the container runtime makes.
LEFT_OUT = ("./var/cache/apt/*", "./var/lib/apt/lists/*", "./dev/*", "./proc/*", "./sys/*")

# The first of these that is set names the certificates that this machine trusts instead of the usual ones.
CERTIFICATE_SETTINGS = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT")
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"

# A build of other code adds four, 80 MB in all.
MOST_LAYERS = 60

# Everything that these programs mount or start ends with them, however they end.
ISOLATED = ("/usr/bin/unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


class ImageBuildError(Exception):
    """debootstrap or buildah failed; the message ends with its last output."""


@dataclass(frozen=True)
class Image:
    """`name`: for a pod's spec, once the OCI `archive` is loaded into the nodes, after that of `base_image` if it is
    built on it: it lacks those layers."""

    name: str
    archive: Path


def base_image() -> Image:
    """Debian with Python, from the cache or newly made. Raises MachineUnfit, ImageBuildError."""
    # debootstrap sets packages up in the new root, so these alone decide what it makes.
    key = hashlib.sha256("\0".join((SUITE, *CONTENTS, *LEFT_OUT, FORM)).encode()).hexdigest()[:12]
    folder = _cache()
    image = Image(f"tpu-operator.dev/python:{key}", folder / f"python-{key}.tar")
    if not image.archive.exists():
        with directories.locked(folder / "lock", waiting="waiting: another process makes the base image"):
            if not image.archive.exists():
                _bootstrap(image)
    return image


def build_image(dockerfile: Path, context: Path, tag: str, build_args: Mapping[str, str], into: Path) -> Image:
    """Builds a Dockerfile whose base is ${BASE_IMAGE} on `base_image`, and writes the archive into folder `into`.

    tag: the image's name, with registry ("localhost/operator:test"). Raises MachineUnfit, ImageBuildError.
    """
    image, storage = Image(tag, _archive(tag, into)), _cache() / "layers"
    arguments = {"BASE_IMAGE": f"oci-archive:{base_image().archive}", **build_args}
    build = (
        "bud",
        "--isolation=chroot",
        "--layers",
        f"--file={dockerfile}",
        f"--tag={tag}",
        *(f"--build-arg={name}={value}" for name, value in arguments.items()),
        *_trusted_certificates(),
        str(context),
    )
    with directories.locked(_cache() / "layers.lock", waiting="waiting: another process builds an image"):
        if len(list(storage.glob("overlay/*"))) > MOST_LAYERS:
            shutil.rmtree(storage)
        is_new = not storage.exists()
        try:
            _build(storage, build, image)
        except ImageBuildError:
            if is_new:
                raise
            # A build that was killed may have left half a layer.
            shutil.rmtree(storage)
            _build(storage, build, image)
    return image


def _build(storage: Path, build: tuple[str, ...], image: Image) -> None:
    """Runs buildah with its layers in `storage`."""
    scratch = directories.create_cluster_directory()
    try:
        _buildah(scratch, storage, *build)
        image.archive.unlink(missing_ok=True)
        # In this form layers are not compressed, which would cost seconds here and in each node.
        made = scratch / "image.tar"
        _buildah(scratch, storage, "push", image.name, f"docker-archive:{made}:{image.name}")
        oci.rewrite_image(made, image.archive, image.name, on=oci.layers_of(base_image().archive))
    finally:
        directories.remove_cluster_directory(scratch)


def base_image_with(tag: str, opened: str, settings: Mapping[str, object], into: Path) -> Image:
    """The base image under another name, with other settings, and with the folder `opened` to everybody.

    Takes no time, where a Dockerfile would take ten seconds. Raises MachineUnfit, ImageBuildError.
    """
    archive = _archive(tag, into)
    upper = archive.with_suffix(".upper")
    oci.write_folder_layer(upper, opened)
    oci.write_image(archive, tag, [upper], settings, on=oci.layers_of(base_image().archive))
    upper.unlink()
    return Image(tag, archive)


def _cache() -> Path:
    return directories.cache_root() / "images"


def _archive(tag: str, into: Path) -> Path:
    return into / f"{hashlib.sha256(tag.encode()).hexdigest()[:12]}.tar"


def _bootstrap(image: Image) -> None:
    print("making the base image (about 1 min, once)", file=sys.stderr, flush=True)
    started = time.monotonic()
    scratch = directories.create_cluster_directory()
    root, layer, archive = scratch / "root", scratch / "layer.tar", scratch / "image.tar"
    debootstrap = str(packages.find("debootstrap"))
    try:
        _run(scratch, (debootstrap, "--variant=minbase", f"--include={','.join(CONTENTS)}", SUITE, str(root)))
        excluded = [f"--exclude={pattern}" for pattern in LEFT_OUT]
        _run(scratch, ("/usr/bin/tar", "--create", f"--file={layer}", f"--directory={root}", *excluded, "."))
        oci.write_image(archive, image.name, [layer], {})
        archive.rename(image.archive)
    finally:
        directories.remove_cluster_directory(scratch)
    print(f"made {image.name} in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def _trusted_certificates() -> list[str]:
    """The flags that let a build step trust the certificates that this machine's environment names."""
    named = [os.environ[name] for name in CERTIFICATE_SETTINGS if os.environ.get(name)]
    return [f"--volume={named[0]}:{CERTIFICATES}:ro"] if named else []


def _buildah(scratch: Path, storage: Path, *arguments: str) -> None:
    # The nodes' containerd needs the same driver in the same file system. With vfs each step copied the whole image.
    places = (f"--root={storage}", f"--runroot={scratch / 'run'}", "--storage-driver=overlay")
    _run(scratch, (str(packages.find("buildah")), *places, *arguments))


def _run(scratch: Path, command: tuple[str, ...]) -> None:
    """Runs a program that keeps its temporary files in `scratch`. Raises ImageBuildError."""
    environment = os.environ | {"PATH": packages.PATH, "TMPDIR": str(scratch)}
    done = subprocess.run(
        launched((*ISOLATED, *command)),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = "\n".join(done.stdout.splitlines()[-30:])
        raise ImageBuildError(f"{Path(command[0]).name} ended with {done.returncode}:\n{last}")


def main() -> int:
    try:
        image = base_image()
    except (packages.MachineUnfit, ImageBuildError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{image.name:60} {image.archive}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
