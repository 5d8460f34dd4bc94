"""`tpujob logs` with real kubelets prints each line once, across restarts of the gang and of the API server."""

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from tests.cluster.cluster import Cluster
from tests.cluster.deadlines import deadline
from tests.cluster.processes import wait_until
from tests.controlplane import tpujob
from tests.e2e.space import REPOSITORY, Space
from tests.trainer.fork_server import ForkedProcess

LONG = 100_000
# Counts, after a line that a container runtime stores in several parts; exits with 74 at SIGUSR1 and 0 at SIGUSR2.
COUNTS = f"""
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
signal.signal(signal.SIGUSR1, lambda *_: os._exit(74))
signal.signal(signal.SIGUSR2, lambda *_: os._exit(0))
print("long", "x" * {LONG}, flush=True)
number = 0
while True:
    print("attempt", os.environ["TPUJOB_ATTEMPT"], "line", number, flush=True)
    number += 1
    time.sleep(0.05)
"""
HOSTS = range(2)


class Following:
    """A running `tpujob logs --all --follow`; its output goes to a file."""

    def __init__(self, process: ForkedProcess, output: Path, errors: Path) -> None:
        self.process = process
        self._output = output
        self._errors = errors

    def numbers(self) -> dict[tuple[int, int], list[int]]:
        """The line numbers in order, by attempt and host."""
        found = defaultdict(list)
        for host, attempt, number in re.findall(
            r"^\[0/(\d)\] attempt (\d) line (\d+)$", self._output.read_text(), re.MULTILINE
        ):
            found[int(attempt), int(host)].append(int(number))
        return found

    def length_of_long_lines(self) -> int:
        return self._output.read_text().count("x")

    def told(self) -> str:
        return self._errors.read_text()

    def wait_for_all(self, attempt: int, more_than: int = 0) -> None:
        def seen() -> bool:
            numbers = self.numbers()
            return all(len(numbers[attempt, host]) > more_than for host in HOSTS)

        wait_until(seen, timeout=120, what=f"lines of every host of attempt {attempt}: {self.told()}")


@contextmanager
def following(space: Space, directory: Path) -> Iterator[Following]:
    output, errors = directory / "output", directory / "errors"
    for file in (output, errors):
        file.touch()
    streams = {1: str(output), 2: str(errors)}
    process = tpujob.start(streams, "logs", "digits", "--all", "--follow", *_where(space))
    try:
        yield Following(process, output, errors)
    finally:
        process.kill()
        process.wait()


def _where(space: Space) -> list[str]:
    return ["--namespace", space.name, "--kubeconfig", str(space.cluster.kubeconfig)]


def told(space: Space, *arguments: str) -> str:
    done = tpujob.tpujob(*arguments, *_where(space))
    assert done.returncode == 0, done.stderr
    return done.stdout


def apply_counting(space: Space) -> None:
    job = yaml.safe_load((REPOSITORY / "examples" / "digits.yaml").read_text())
    job["spec"]["slice"]["acceleratorType"] = "v5litepod-8"
    del job["spec"]["trainer"]["entrypoint"]
    job["spec"]["trainer"]["command"] = ["python3", "-c", COUNTS]
    space.kubectl("apply", "-f", "-", input=yaml.safe_dump(job))


def send(space: Space, pod: str, number: int) -> None:
    # The container may be gone before the command in it has ended.
    space.kubectl("exec", pod, "--", "python3", "-c", f"import os; os.kill(1, {number})", check=False)


def test_logs_are_followed_over_restarts_of_the_gang_and_of_the_api_server(
    cluster: Cluster, alone: None, space: Space, tmp_path: Path
) -> None:
    apply_counting(space)
    space.wait_running()
    with following(space, tmp_path) as logs:
        logs.wait_for_all(attempt=1)
        assert told(space, "logs", "digits", "--host", "1", "--tail", "1").startswith("attempt 1 line ")

        send(space, "digits-1-0-1", 10)
        logs.wait_for_all(attempt=2)
        assert "digits-1-0-1" in told(space, "status", "digits")
        # The failed pod is kept with its log.
        assert "attempt 1 line 0\n" in told(space, "logs", "digits", "--failed")

        before = max(numbers[-1] for (attempt, _), numbers in logs.numbers().items() if attempt == 2)
        if cluster.owns_nodes:
            cluster.restart_apiserver()
        logs.wait_for_all(attempt=2, more_than=before + 20)
        for host in HOSTS:
            send(space, f"digits-2-0-{host}", 12)
        assert logs.process.wait(timeout=deadline(120)) == 0

    assert "attempt 2 follows" in logs.told()
    found = logs.numbers()
    assert set(found) == {(attempt, host) for attempt in (1, 2) for host in HOSTS}
    for place, numbers in found.items():
        assert numbers == list(range(len(numbers))), f"lines of attempt and host {place}"
    assert logs.length_of_long_lines() == 2 * len(HOSTS) * LONG
