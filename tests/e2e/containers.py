"""The processes of a pod's container as this machine sees them, to do to them what a kubelet offers no way to do."""

import os
import signal
from pathlib import Path

from tests.cluster.api import Object
from tests.cluster.processes import wait_until

SIGNAL_SECONDS = 10.0


def container_id(pod: Object) -> str:
    """The id of the pod's only container, which must have started."""
    [status] = pod["status"]["containerStatuses"]
    return str(status["containerID"]).partition("://")[2]


def processes(pod: Object) -> dict[int, int]:
    """The pids of its container's processes: on this machine -> inside the container, where the first process is 1."""
    wanted = container_id(pod)
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "cgroup").read_text():
                found[int(folder.name)] = int(_field(folder, "NSpid").split()[-1])
        except OSError:  # it has ended meanwhile
            continue
    return found


def kill(pod: Object) -> None:
    """Sends SIGKILL to the container's first process, which kills all of them; returns when they have ended."""
    [first] = [pid for pid, inside in processes(pod).items() if inside == 1]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not processes(pod), timeout=SIGNAL_SECONDS, what="the container's processes have ended")


def stop(pod: Object) -> None:
    """Sends SIGSTOP to every process of the container; returns when all of them have stopped."""
    running = processes(pod)
    assert running, "the container runs"
    for pid in running:
        os.kill(pid, signal.SIGSTOP)
    wait_until(
        lambda: all(_field(Path(f"/proc/{pid}"), "State").startswith("T") for pid in running),
        timeout=SIGNAL_SECONDS,
        what="the container's processes have stopped",
    )


def _field(process: Path, name: str) -> str:
    """A field of /proc/PID/status (proc_pid_status(5)). Raises OSError when the process has ended."""
    lines = (process / "status").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:"))
