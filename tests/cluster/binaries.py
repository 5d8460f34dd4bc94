"""Builds the programs of the test cluster from pinned, checksummed Go modules, once per machine and version.

`python -m tests.cluster.binaries [NAME...]` builds the named programs, or all that this machine can use, and prints
their versions; run first, it keeps the minutes of a first build out of the tests. go/MODULE/go.mod alone sets the
versions. Binaries are kept under `directories.cache_root()`, outside the checkout, in a folder named after everything
that decides what is built.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import directories, packages, processes, toolchain

GO_MODULES = Path(__file__).with_name("go")


class BuildError(Exception):
    """`go` failed; the message holds its output."""


@dataclass(frozen=True)
class Binary:
    """One program: `package` is built in the module go/`folder`, which pins it through `requirement`.

    `requirement`: empty for a program of this repository itself, which has no version.
    `first_build`: how long the first build takes, shown to the user; measured on 2 cores with an empty cache.
    `version_command`: the arguments that print its version; empty for a program without one.
    """

    name: str
    folder: str
    requirement: str
    package: str
    first_build: str
    version_command: tuple[str, ...] = ("--version",)

    @property
    def version(self) -> str:
        if not self.requirement:
            return ""
        text = (GO_MODULES / self.folder / "go.mod").read_text()
        found = re.search(rf"^(?:require )?\s*{re.escape(self.requirement)} (v\S+)$", text, re.MULTILINE)
        assert found is not None, f"go/{self.folder}/go.mod requires {self.requirement}"
        return found.group(1)


def _kubernetes(name: str, first_build: str, version_command: tuple[str, ...] = ("--version",)) -> Binary:
    package = f"k8s.io/kubernetes/cmd/{name}"
    return Binary(name, "kubernetes", "k8s.io/kubernetes", package, first_build, version_command)


BINARIES = {
    binary.name: binary
    for binary in (
        Binary(
            "actionlint",
            "actionlint",
            "github.com/rhysd/actionlint",
            "github.com/rhysd/actionlint/cmd/actionlint",
            "15 s",
            ("-version",),
        ),
        Binary("etcd", "etcd", "go.etcd.io/etcd/server/v3", ".", "25 s"),
        _kubernetes("kube-apiserver", "3 min"),
        _kubernetes("kube-controller-manager", "1 min"),
        _kubernetes("kube-scheduler", "5 s"),
        _kubernetes("kubectl", "20 s", ("version", "--client")),
        _kubernetes("kubelet", "15 s"),
        _kubernetes("kube-proxy", "5 s"),
        Binary("coredns", "coredns", "github.com/coredns/coredns", ".", "90 s", ("-version",)),
        Binary("helm", "helm", "helm.sh/helm/v4", "helm.sh/helm/v4/cmd/helm", "100 s", ("version", "--short")),
        Binary("pause", "pause", "", ".", "1 s", ()),
        Binary(
            "fake-gcs-server",
            "fake-gcs-server",
            "github.com/fsouza/fake-gcs-server",
            "github.com/fsouza/fake-gcs-server",
            "30 s",
            (),
        ),
        Binary("gitops", "gitops", "", ".", "1 min", ()),
        Binary("kwok", "kwok", "sigs.k8s.io/kwok", "sigs.k8s.io/kwok/cmd/kwok", "75 s"),
        Binary("jobset", "jobset", "sigs.k8s.io/jobset", "sigs.k8s.io/jobset", "some minutes", ()),
    )
}


CONTROL_PLANE_PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
# Only useful where real nodes can run.
NODE_PROGRAMS = ("pause", "kubelet", "kube-proxy", "coredns")
# Only for `make bench`.
BENCH_PROGRAMS = ("jobset",)


def ensure(*names: str) -> dict[str, Path]:
    """The path of each named program, building what the cache does not hold.

    Raises ToolchainMissing without `go`, BuildError when a build fails.
    """
    go = toolchain.find("go", purpose="build the test cluster's Kubernetes", install="Go 1.26 or newer")
    return {name: _ensure_one(go, BINARIES[name]) for name in names}


def module_folder(folder: str, module: str) -> Path:
    """Returns the folder with the sources of a module that go/`folder` pins; downloads it once.

    Raises ToolchainMissing, BuildError.
    """
    go = toolchain.find("go", purpose=f"download {module}", install="Go 1.26 or newer")
    done = subprocess.run(
        processes.launched((go, "mod", "download", "-json", module)),
        cwd=GO_MODULES / folder,
        env=os.environ | {"GOFLAGS": "-mod=readonly", "GOWORK": "off"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise BuildError(f"go mod download {module} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return Path(json.loads(done.stdout)["Dir"])


def _ensure_one(go: str, binary: Binary) -> Path:
    folder = directories.cache_root() / "binaries" / _key(go, binary)
    target = folder / binary.name
    if target.exists():
        return target
    label = f"{binary.name} {binary.version}".strip()
    with directories.locked(folder / "lock", waiting=f"waiting: another process builds for {label}"):
        if not target.exists():
            _build(go, binary, target, label)
    return target


def _build(go: str, binary: Binary, target: Path, label: str) -> None:
    print(f"building {label} (about {binary.first_build}, once)", file=sys.stderr, flush=True)
    # A killed build leaves its unfinished file behind; while we hold the lock, nobody else is writing one.
    for unfinished in target.parent.glob(f"{target.name}.unfinished-*"):
        unfinished.unlink()
    unfinished = target.with_name(f"{target.name}.unfinished-{os.getpid()}")
    started = time.monotonic()
    _go(go, binary, "build", *_build_flags(binary), "-o", str(unfinished), binary.package)
    unfinished.rename(target)
    print(f"built {label} in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def _build_flags(binary: Binary) -> tuple[str, ...]:
    """-buildvcs=false: a program is the same whatever is checked out around its module."""
    linker = ["-s", "-w", *(f"-X {variable}={value}" for variable, value in _stamps(binary))]
    return ("-trimpath", "-buildvcs=false", "-ldflags", " ".join(linker))


def _stamps(binary: Binary) -> list[tuple[str, str]]:
    """Version variables for the linker. Kubernetes reports v0.0.0 without them; the others know their version."""
    if binary.folder != "kubernetes":
        return []
    major, minor, _ = binary.version.removeprefix("v").split(".")
    values = {"gitVersion": binary.version, "gitMajor": major, "gitMinor": minor}
    return [(f"k8s.io/component-base/version.{name}", value) for name, value in values.items()]


def _key(go: str, binary: Binary) -> str:
    """A cache folder's name: digest of the module's files, Go's version with its platform, the flags."""
    digest = hashlib.sha256()
    for file in sorted((GO_MODULES / binary.folder).iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    digest.update(_go(go, binary, "version").encode())
    digest.update("\0".join(_build_flags(binary)).encode())
    return f"{binary.folder}-{digest.hexdigest()[:16]}"


def _go(go: str, binary: Binary, *arguments: str) -> str:
    """Runs `go` in the binary's module and returns its output. Raises BuildError."""
    # The machine's GOFLAGS or workspace must not change what is built; the rest of its Go setup applies.
    environment = os.environ | {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly", "GOWORK": "off"}
    done = subprocess.run(
        processes.launched((go, *arguments)),
        cwd=GO_MODULES / binary.folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        where = f"go {arguments[0]} for {binary.name} (tests/cluster/go/{binary.folder})"
        raise BuildError(f"{where} ended with {done.returncode}:\n{done.stderr.strip()}")
    return done.stdout


def main(names: list[str]) -> int:
    unknown = sorted(set(names) - set(BINARIES))
    if unknown:
        print(f"no such program: {', '.join(unknown)}; there are {', '.join(BINARIES)}", file=sys.stderr)
        return 2
    try:
        paths = ensure(*(names or _of_use_here()))
    except (toolchain.ToolchainMissing, BuildError) as error:
        print(error, file=sys.stderr)
        return 1
    for name, path in paths.items():
        print(f"{name:24} {_says_its_version(path, BINARIES[name]):36} {path}")
    return 0


def _of_use_here() -> list[str]:
    without = (*BENCH_PROGRAMS, *(NODE_PROGRAMS if packages.missing() else ()))
    return [name for name in BINARIES if name not in without]


def _says_its_version(path: Path, binary: Binary) -> str:
    if not binary.version_command:
        return ""
    shown = subprocess.run([str(path), *binary.version_command], capture_output=True, text=True, check=True)
    return shown.stdout.splitlines()[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
