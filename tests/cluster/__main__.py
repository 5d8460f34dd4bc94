"""A real cluster for interactive use: `python -m tests.cluster up` and `down` (`make cluster-up`, `make cluster-down`).

`--on kind` makes it with kind (`make kind-up`, `make kind-down`).

A cluster in a test run ends with the run. Here a background process takes the run's place and keeps the cluster until
`down`. There is one such cluster at a time; test runs start their own beside it.
"""

import argparse
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from tests.cluster import binaries, directories, network, packages, project_images, toolchain
from tests.cluster.binaries import CONTROL_PLANE_PROGRAMS, NODE_PROGRAMS
from tests.cluster.cluster import KINDS, make
from tests.cluster.images import ImageBuildError, base_image
from tests.cluster.kind import KindError
from tests.cluster.processes import ProcessError, ProcessRecord, wait_until

START_SECONDS = 900.0
LOG_LINES = 30

# Errors that keep a cluster from starting and that the user has to fix.
REFUSALS = (
    packages.MachineUnfit,
    toolchain.ToolchainMissing,
    binaries.BuildError,
    ImageBuildError,
    network.NetworkError,
    ProcessError,
    KindError,
    TimeoutError,
)


def folder() -> Path:
    """Holds `keeper` (the background process's record), `log`, and `kubeconfig`, a link that exists while it is up."""
    return directories.cache_root() / "detached"


def up(kind: str, nodes: int, images: bool) -> int:
    """Prints `export KUBECONFIG=...` when the cluster is up; the rest goes to stderr."""
    packages.require()
    needed = (*CONTROL_PLANE_PROGRAMS, *NODE_PROGRAMS) if kind == "own" else ("kubectl",)
    programs = binaries.ensure(*needed, *(["helm"] if images else []))
    record = ProcessRecord.read(folder() / "keeper")
    if record is not None and record.is_running():
        print("the cluster is up already; `down` takes it down", file=sys.stderr)
        return 1
    folder().mkdir(parents=True, exist_ok=True)
    (folder() / "kubeconfig").unlink(missing_ok=True)
    with (folder() / "log").open("w") as log:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster", "keep", *sys.argv[2:]],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    wait_until(
        lambda: (folder() / "kubeconfig").exists() or keeper.poll() is not None,
        timeout=START_SECONDS,
        what=f"the cluster is up; see {folder() / 'log'}",
    )
    if keeper.returncode is not None:
        print("\n".join((folder() / "log").read_text().splitlines()[-LOG_LINES:]), file=sys.stderr)
        return 1
    for name in ("kubectl", "helm"):
        if name in programs:
            print(f"{name} is {programs[name]}", file=sys.stderr)
    print(f"export KUBECONFIG={(folder() / 'kubeconfig').resolve()}")
    return 0


def down() -> int:
    """Also removes what killed test runs left behind."""
    record = ProcessRecord.read(folder() / "keeper")
    if record is not None:
        record.end(signal.SIGTERM)
    directories.sweep()
    print("the cluster is down", file=sys.stderr)
    return 0


def keep(kind: str, nodes: int, images: bool) -> NoReturn:
    """The background process: holds the cluster until SIGTERM."""
    # Raised as an exception, so that it also stops a cluster that is still starting.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ProcessRecord.own().write(folder() / "keeper")
    cluster = make(kind, nodes, project_images.SHARED if images else ())
    cluster.start()
    try:
        if images:
            project_images.load(cluster, [base_image(), *project_images.build(cluster.directory)])
        (folder() / "kubeconfig").symlink_to(cluster.kubeconfig)
        while True:
            signal.pause()
    finally:
        cluster.stop()


def _count(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= network.MAX_NODES):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 to {network.MAX_NODES}")
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description="A real cluster on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("up", "start a cluster that stays"), ("keep", "hold a cluster until SIGTERM")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--on", choices=KINDS, default="own", help="nodes of this package's own, or kind's")
        command.add_argument("--nodes", type=_count, default=2, metavar="N")
        command.add_argument("--images", action="store_true", help="with the images of README's commands in the nodes")
    commands.add_parser("down", help="take it down")
    arguments = parser.parse_args()
    try:
        if arguments.command == "down":
            return down()
        start = up if arguments.command == "up" else keep
        return start(arguments.on, arguments.nodes, arguments.images)
    except REFUSALS as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
