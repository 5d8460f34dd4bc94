"""Programs are built once per version, completely or not at all. A fake `go` counts them."""

import re
import threading
from pathlib import Path

import pytest

from tests.cluster import binaries
from tests.cluster.processes import wait_until

# Arguments of `go build FLAGS -o OUT PACKAGE`: OUT is the last but one.
FAKE_GO = """#!/bin/sh
here={here}
case $1 in
version) cat $here/version ;;
build)
    while [ -e $here/hold ]; do sleep 0.02; done
    echo built >> $here/builds
    if [ -e $here/broken ]; then echo "missing go.sum entry" >&2; exit 1; fi
    while [ $# -gt 2 ]; do shift; done
    echo program > "$1" ;;
esac
"""


class FakeGo:
    """hold: builds wait while this file exists. broken: builds fail while it exists. builds: a line for each."""

    def __init__(self, folder: Path) -> None:
        self.hold, self.broken, self.version = (folder / name for name in ("hold", "broken", "version"))
        self._builds = folder / "builds"
        self._builds.touch()
        self.version.write_text("go version go1.99.1 linux/amd64\n")
        program = folder / "go"
        program.write_text(FAKE_GO.format(here=folder))
        program.chmod(0o755)

    @property
    def builds(self) -> int:
        return len(self._builds.read_text().splitlines())


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGo:
    folder = tmp_path / "go"
    folder.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return FakeGo(folder)


def test_a_program_is_built_once_for_each_go_and_announced(go: FakeGo, capfd: pytest.CaptureFixture[str]) -> None:
    first = binaries.ensure("etcd")
    assert re.search(r"building etcd v\S+ \(about 25 s, once\)", capfd.readouterr().err)
    assert binaries.ensure("etcd") == first
    assert first["etcd"].read_text() == "program\n"
    assert go.builds == 1
    go.version.write_text("go version go1.99.2 linux/amd64\n")
    assert binaries.ensure("etcd")["etcd"].parent != first["etcd"].parent


def test_two_runs_at_once_build_once(go: FakeGo, capfd: pytest.CaptureFixture[str]) -> None:
    go.hold.touch()
    runs = [threading.Thread(target=binaries.ensure, args=("etcd",)) for _ in range(2)]
    for run in runs:
        run.start()
    seen: list[str] = []

    def one_waits() -> bool:
        seen.append(capfd.readouterr().err)
        return "waiting: another process builds for etcd" in "".join(seen)

    wait_until(one_waits, timeout=10, what="one run waits for the other")
    go.hold.unlink()
    for run in runs:
        run.join()
    assert go.builds == 1


def test_a_failed_build_leaves_nothing_and_is_tried_again(go: FakeGo) -> None:
    go.broken.touch()
    with pytest.raises(binaries.BuildError, match=r"go build for etcd .*\n?.*missing go.sum entry"):
        binaries.ensure("etcd")
    go.broken.unlink()
    assert binaries.ensure("etcd")["etcd"].exists()


def test_staging_modules_are_of_the_pinned_kubernetes_release() -> None:
    release = binaries.BINARIES["kube-apiserver"].version.removeprefix("v1.")
    text = (binaries.GO_MODULES / "kubernetes" / "go.mod").read_text()
    replaced = re.findall(r"^\t(k8s\.io/\S+) => (k8s\.io/\S+) v0\.(\S+)$", text, re.MULTILINE)
    assert replaced
    assert [entry for entry in replaced if entry != (entry[0], entry[0], release)] == []
