"""Children of a test cluster: awaited, stopped, and never left behind, even by a killed test run."""

import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import directories
from tests.cluster.deadlines import deadline
from tests.cluster.processes import Child, Children, ProcessError, ProcessRecord, start_ticks, wait_until

REPOSITORY = Path(__file__).parents[3]
SHELL = Path("/bin/sh")
SLEEP = shutil.which("sleep") or "sleep"
# Says "up", then waits for SIGTERM and says so.
POLITE = "trap 'echo ended by SIGTERM; exit' TERM; echo up; while :; do sleep 0.02; done"
STUBBORN = "trap '' TERM; echo up; while :; do sleep 0.02; done"


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    group = Children(tmp_path, {"PATH": os.defpath})
    yield group
    group.stop_all(grace=0.1)


def says(child: Child, word: str) -> bool:
    return word in child.log.read_text()


def ended(pid_fd: int, *, seconds: float) -> bool:
    """Whether the process behind a pidfd ends within `seconds`."""
    poll = select.poll()
    poll.register(pid_fd, select.POLLIN)
    return bool(poll.poll(deadline(seconds) * 1000))


def test_a_child_dies_when_its_starter_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.cluster.processes import Children\n"
        "child = Children(Path(sys.argv[1]), {}).start('sleeper', Path(sys.argv[2]), '600')\n"
        "print(child.pid, flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), SLEEP],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as starter:
        pid = int(starter.stdout.readline())
        child = os.pidfd_open(pid)
        # Before exec the launcher itself notices a dead starter; this tests the time after exec.
        name = Path(f"/proc/{pid}/comm")
        wait_until(lambda: name.read_text() == "sleep\n", timeout=10, what="the child runs its program")
        starter.send_signal(signal.SIGKILL)
        starter.wait()
        assert ended(child, seconds=10)
    os.close(child)


def test_a_child_survives_the_thread_that_asked_for_it(children: Children) -> None:
    started: list[Child] = []

    def start() -> None:
        child = children.start("polite", SHELL, "-c", POLITE)
        child.wait_ready(lambda: says(child, "up"), timeout=10)
        started.append(child)

    thread = threading.Thread(target=start)
    thread.start()
    kernel_thread = Path(f"/proc/self/task/{thread.native_id}")
    thread.join()
    wait_until(lambda: not kernel_thread.exists(), timeout=10, what="the thread has ended")
    children.stop("polite", grace=10)
    assert says(started[0], "ended by SIGTERM")


def test_a_child_that_ignores_sigterm_is_killed(children: Children) -> None:
    child = children.start("stubborn", SHELL, "-c", STUBBORN)
    child.wait_ready(lambda: says(child, "up"), timeout=10)
    children.stop("stubborn", grace=0.1)
    assert start_ticks(child.pid) is None


def test_waiting_for_a_child_that_ends_shows_its_log(children: Children) -> None:
    child = children.start("broken", SHELL, "-c", "echo no such flag; exit 3")
    with pytest.raises(ProcessError, match=r"broken ended with 3\n(.|\n)*no such flag"):
        child.wait_ready(lambda: False, timeout=10)


class TestSweep:
    """What a new run does with the directories that earlier runs left."""

    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    @pytest.fixture
    def sleeper(self) -> Iterator[subprocess.Popen[bytes]]:
        with subprocess.Popen([SLEEP, "600"]) as process:
            yield process
            process.kill()

    @pytest.fixture
    def left_over(self) -> Path:
        """The directory of a run whose process is gone."""
        with subprocess.Popen([SLEEP, "600"]) as owner:
            ticks = start_ticks(owner.pid)
            owner.kill()
        assert ticks is not None
        directory = directories.clusters_root() / "killed"
        directory.mkdir(parents=True)
        ProcessRecord(owner.pid, ticks, (SLEEP, "600")).write(directory / directories.OWNER_FILE)
        return directory

    def test_a_running_owner_keeps_its_directory(self) -> None:
        first = directories.create_cluster_directory()
        second = directories.create_cluster_directory()
        assert first.is_dir()
        assert second.is_dir()

    def test_a_dead_owner_s_directory_and_process_go(self, left_over: Path, sleeper: subprocess.Popen[bytes]) -> None:
        ticks = start_ticks(sleeper.pid)
        assert ticks is not None
        ProcessRecord(sleeper.pid, ticks, (SLEEP, "600")).write(left_over / "etcd.pid")
        directories.create_cluster_directory()
        assert sleeper.wait(timeout=deadline(10)) == -signal.SIGKILL
        assert not left_over.exists()

    @pytest.mark.parametrize(
        ("later", "argv"), [(1, (SLEEP, "600")), (0, (SLEEP, "601"))], ids=["other start", "other command"]
    )
    def test_a_foreign_process_with_a_recycled_pid_is_left_alone(
        self, left_over: Path, sleeper: subprocess.Popen[bytes], later: int, argv: tuple[str, ...]
    ) -> None:
        ticks = start_ticks(sleeper.pid)
        assert ticks is not None
        ProcessRecord(sleeper.pid, ticks + later, argv).write(left_over / "etcd.pid")
        directories.create_cluster_directory()
        assert sleeper.poll() is None
        assert not left_over.exists()

    def test_half_written_files_do_not_stop_a_sweep(self, left_over: Path) -> None:
        (left_over / directories.OWNER_FILE).write_text('{"pid": 1')
        (left_over / "etcd.pid").write_text("")
        directories.create_cluster_directory()
        assert not left_over.exists()
