"""requirements.txt of trainer.code: installs the packages that the image lacks, once for a host, with uv.

The image's own packages stay as they are, since torch, torch_xla and libtpu belong together. uv installs into a
directory that holds nothing but their descriptions, so it takes them for installed there, and constraints keep it from
replacing them. What they do not fulfil is added; what they contradict is refused.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from tpu_contract.protocol import ENV_PACKAGES, REQUIREMENTS_FILE, WHEELS_FOLDER, PackageSource
from tpu_contract.words import cut
from tpu_trainer.contract.errors import StorageError, UserCodeError
from tpu_trainer.storage import open_store

_MARK = "installed.txt"
# Of the 4096 bytes of a termination message.
_MOST_SAID = 2000
_BUCKET_LINE = re.compile(r"""^\s*(?:--find-links|-f)[ =]+["']?(gs://[^\s"']+)["']?\s*?(?:\s#.*)?$""", re.MULTILINE)
# What uv says if a later try may succeed.
_MAY_PASS = re.compile(
    r"error sending request|dns error|connection (?:refused|reset|closed)|timed out|status server error|429 Too Many"
    r"|failed to connect|could not resolve|no space left",
    re.IGNORECASE,
)
_WHEELHOUSE_ONLY = (
    "\nhint: this cluster installs from a wheelhouse only: put the wheels into the folder wheels/ beside the file, name"
    " their bucket in a line `--find-links gs://BUCKET/FOLDER`, or take an image that has them"
)
_NO_UV = "the image has no uv, which installs packages: build it on the trainer's image, or install them in it"


def install_packages(directory: Path, environ: Mapping[str, str]) -> tuple[Path, tuple[str, ...]] | None:
    """Returns where the packages are that the folder's requirements.txt adds, and their names with versions. None
    without such a file, and where packages must be installed already, as in `tpujob run`.

    Raises:
        UserCodeError: uv refuses the file, or finds no packages that fit it and the image.
        StorageError: the index or the bucket cannot be reached, or the packages cannot be written.
    """
    source = environ.get(ENV_PACKAGES, PackageSource.INDEX)
    if source == PackageSource.INSTALLED or not (directory / REQUIREMENTS_FILE).is_file():
        return None
    target, described = directory.parent / "packages", _described()
    try:
        text = (directory / REQUIREMENTS_FILE).read_bytes().decode(errors="replace")
        key = hashlib.sha256("\n".join([text, *sorted(described)]).encode()).hexdigest()
        if (done := _read_mark(target, key)) is None:
            shutil.rmtree(target, ignore_errors=True)
            _describe_image(target, described)
            _install(directory, target, text, sorted(described), source, environ)
            for name in described:
                shutil.rmtree(target / _description(name))
            done = tuple(sorted(f"{one.name}=={one.version}" for one in metadata.distributions(path=[str(target)])))
            (target / _MARK).write_text("\n".join([key, *done]), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{REQUIREMENTS_FILE}: cannot be installed on this host: {error.strerror}") from error
    print(f"{REQUIREMENTS_FILE}: added {', '.join(done) or 'nothing, as the image has everything'}", flush=True)
    return target, done


def _described() -> dict[str, str]:
    """Returns the description of each package of the image by `name==version`."""
    found: dict[str, metadata.Distribution] = {}
    for one in metadata.distributions():
        # Python imports the first of several.
        found.setdefault(_normal(one.name or ""), one)
    return {f"{one.name}=={one.version}": one.read_text("METADATA") or "" for name, one in found.items() if name}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def _read_mark(target: Path, key: str) -> tuple[str, ...] | None:
    """Returns what an earlier process of this host, such as the slice check, has installed from the same file."""
    try:
        found, *packages = (target / _MARK).read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ValueError):
        return None
    return tuple(packages) if found == key else None


def _description(package: str) -> str:
    name, _, version = package.partition("==")
    return f"{_normal(name)}-{version}.dist-info"


def _describe_image(target: Path, described: Mapping[str, str]) -> None:
    for package, text in described.items():
        place = target / _description(package)
        place.mkdir(parents=True, exist_ok=True)
        (place / "METADATA").write_text(text, encoding="utf-8", errors="surrogateescape")


def _install(
    directory: Path, target: Path, text: str, image: Sequence[str], source: str, environ: Mapping[str, str]
) -> None:
    parent = directory.parent
    (parent / "constraints.txt").write_text("\n".join(image), encoding="utf-8")
    # Beside the original, because paths in it are relative to it.
    file = directory / f".{REQUIREMENTS_FILE}"
    file.write_text(_BUCKET_LINE.sub("", text), encoding="utf-8")
    wheels, offline = directory / WHEELS_FOLDER, source == PackageSource.WHEELHOUSE
    options = [*(["--offline"] if offline else []), *(["--no-index"] if offline or wheels.is_dir() else [])]
    options += [f"--find-links={wheels}"] if wheels.is_dir() else []
    for number, uri in enumerate(_BUCKET_LINE.findall(text)):
        options.append(f"--find-links={_fetch_wheels(uri, parent / f'wheelhouse-{number}')}")
    command = [_find_uv(environ), "pip", "install", "--quiet", "--no-progress", "--color=never"]
    command += [f"--python={sys.executable}", f"--target={target}", f"--constraints={parent / 'constraints.txt'}"]
    # The cache is on the directory's disk, so that files need not be copied; the user may name another one. Without
    # COLUMNS uv breaks its sentences into lines as wide as a terminal.
    environment = {"UV_CACHE_DIR": str(parent / "uv"), **environ, "COLUMNS": "1000"}
    done = subprocess.run(  # noqa: S603
        [*command, *options, f"--requirements={file}"],
        env=environment,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    file.unlink()
    said = done.stderr.replace(f".{REQUIREMENTS_FILE}", REQUIREMENTS_FILE).strip()
    if done.returncode:
        raise _failure(
            cut(said, _MOST_SAID) or f"uv exited with code {done.returncode}",
            wheels_only=offline,
        )


def _failure(said: str, *, wheels_only: bool) -> UserCodeError | StorageError:
    if _MAY_PASS.search(said):
        return StorageError(f"{REQUIREMENTS_FILE}: uv says: {said}")
    hint = _WHEELHOUSE_ONLY if wheels_only else ""
    return UserCodeError(f"{REQUIREMENTS_FILE} (packages of the image keep their versions): uv says: {said}{hint}")


def _find_uv(environ: Mapping[str, str]) -> str:
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv", path=environ.get("PATH"))
    if found is None:
        raise UserCodeError(f"{REQUIREMENTS_FILE}: {_NO_UV}")
    return found


def _fetch_wheels(uri: str, into: Path) -> Path:
    store = open_store(uri, REQUIREMENTS_FILE)
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    for name in store.list(""):
        if name.endswith(".whl") and "/" not in name:
            (into / name).write_bytes(store.read(name))
    return into


def module_paths(target: Path) -> list[Path]:
    """Returns where modules are: in the target itself, and where `-e .` points to."""
    lines = [line for file in sorted(target.glob("*.pth")) for line in file.read_text(encoding="utf-8").splitlines()]
    return [target, *(Path(line) for line in lines if line.startswith("/") and Path(line).is_dir())]


def digest(packages: Sequence[str]) -> str | None:
    """Returns the SHA-256 of the packages' names and versions; None without packages."""
    return hashlib.sha256("\n".join(packages).encode()).hexdigest() if packages else None


def bin_path(packages: Path, path: str) -> str:
    """Returns PATH with the programs that the packages bring."""
    return os.pathsep.join([str(packages / "bin"), *filter(None, [path])])
