"""A TPU host before libtpu opens its chips, and its logs after libtpu has failed."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tpu_trainer.contract.errors import BadSpecError
from tpu_trainer.worker import entry
from tpu_trainer.worker.tpu_host import ends_of_logs, prepare

TRAINER = 65532
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")


@contextmanager
def as_trainer() -> Iterator[None]:
    os.seteuid(TRAINER)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root directory with a device folder that every user may look into."""
    (tmp_path / "dev/vfio").mkdir(parents=True)
    for folder in (tmp_path, *list(tmp_path.parents)[:3]):
        if folder.owner() == Path.home().owner():
            folder.chmod(folder.stat().st_mode | 0o555)
    return tmp_path


def chip(root: Path, name: str, mode: int, group: int = 0) -> Path:
    path = root / "dev" / name
    path.touch()
    os.chown(path, 0, group)
    path.chmod(mode)
    return path


def test_a_host_without_chips_is_none_of_its_business(root: Path) -> None:
    assert prepare({}, root).startswith(f"runs as user {os.geteuid()} of group {os.getegid()}; may lock memory ")


@needs_root
@pytest.mark.parametrize(
    ("names", "mode", "group", "remedy"),
    [
        (["vfio/0"], 0o600, 0, "(owner 0, group 0, mode 0600); set runAsUser: 0"),
        (["vfio/12"], 0o660, 44, "(owner 0, group 44, mode 0660); set supplementalGroups: [44]"),
        (["vfio/0"], 0o640, 44, "(owner 0, group 44, mode 0640); set runAsUser: 0"),
        (["accel0", "accel1"], 0o600, 0, "(owner 0, group 0, mode 0600); set runAsUser: 0"),
        (["vfio/vfio"], 0o644, 0, "(owner 0, group 0, mode 0644); set runAsUser: 0"),
    ],
)
def test_chips_that_the_user_may_not_open_are_named_with_the_remedy(
    root: Path, names: list[str], mode: int, group: int, remedy: str
) -> None:
    paths = ", ".join(str(chip(root, name, mode, group)) for name in names)
    with as_trainer(), pytest.raises(BadSpecError) as refused:
        prepare({}, root)
    said = f"trainer.securityContext: user {TRAINER} may not open {paths}: Permission denied {remedy}"
    assert str(refused.value).startswith(said)


@needs_root
def test_chips_that_the_user_may_open_are_left_to_libtpu(root: Path) -> None:
    for name in ("vfio/0", "vfio/vfio"):
        chip(root, name, 0o666)
    # Other files in these folders are nobody's chips.
    chip(root, "acceleration", 0o600)
    chip(root, "vfio/devices", 0o600)
    with as_trainer():
        prepare({}, root)


def test_every_process_may_lock_as_much_memory_as_the_host_lets_it(root: Path) -> None:
    pid = os.fork()
    if not pid:
        try:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 1 << 20))
            if os.geteuid() == 0:
                os.setuid(TRAINER)
            assert "may lock memory up to 1024 KiB" in prepare({}, root)
            assert resource.getrlimit(resource.RLIMIT_MEMLOCK) == (1 << 20, 1 << 20)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_ends_of_the_newest_logs_are_shown_one_for_each_process(tmp_path: Path) -> None:
    for process in range(12):
        for level in ("INFO", "WARNING"):
            path = tmp_path / f"tpu_driver.host.root.log.{level}.20261128-060000.{process}"
            path.write_text(f"{level} of process {process}\n")
            os.utime(path, (process, process))
    (tmp_path / "tpu_driver.INFO").symlink_to(path)
    shown = ends_of_logs({"TPU_LOG_DIR": str(tmp_path)})
    assert [line for line in shown.splitlines() if line.startswith("INFO")] == [
        f"INFO of process {process}" for process in range(4, 12)
    ]
    assert "WARNING" not in shown


def test_a_long_log_loses_its_beginning_at_a_line(tmp_path: Path) -> None:
    lines = [f"line {number} {'x' * 50}" for number in range(1000)]
    (tmp_path / "tpu_driver.log.INFO.1").write_text("\n".join(lines) + "\n")
    header, *shown = ends_of_logs({"TPU_LOG_DIR": str(tmp_path)}).splitlines()
    assert header == "the end of libtpu's tpu_driver.log.INFO.1:"
    assert shown == lines[-len(shown) :]
    assert 4000 < len("\n".join(shown)) < 4096


def test_logs_that_cannot_be_read_do_not_replace_the_runs_own_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_LOG_DIR", "x" * 5000)
    with pytest.raises(OSError, match="too long"):
        ends_of_logs(os.environ)
    entry._show_logs()


@pytest.mark.parametrize("folder", ["missing", "disabled"])
def test_without_logs_nothing_is_shown(tmp_path: Path, folder: str) -> None:
    assert ends_of_logs({"TPU_LOG_DIR": str(tmp_path / folder)}) == ""
