"""`tpujob logs` with real kubelets prints each line once, across restarts of the gang and of the API server."""

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from tests.cluster.cluster import Cluster
from tests.cluster.deadlines import deadline
from tests.cluster.processes import wait_until
from tests.e2e.space import REPOSITORY, Space

TPUJOB = str(Path(sys.prefix) / "bin" / "tpujob")
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

    def __init__(self, process: "subprocess.Popen[bytes]", output: Path, errors: Path) -> None:
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
    command = [TPUJOB, "logs", "digits", "--all", "--follow", *_where(space)]
    with (
        output.open("wb") as out,
        errors.open("wb") as err,
        subprocess.Popen(command, stdout=out, stderr=err) as process,
    ):
        try:
            yield Following(process, output, errors)
        finally:
            process.kill()


def _where(space: Space) -> list[str]:
    return ["--namespace", space.name, "--kubeconfig", str(space.cluster.kubeconfig)]


def tpujob(space: Space, *arguments: str) -> str:
    return subprocess.run([TPUJOB, *arguments, *_where(space)], check=True, capture_output=True, text=True).stdout


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
        assert tpujob(space, "logs", "digits", "--host", "1", "--tail", "1").startswith("attempt 1 line ")

        send(space, "digits-1-0-1", 10)
        logs.wait_for_all(attempt=2)
        assert "digits-1-0-1" in tpujob(space, "status", "digits")
        # The failed pod is kept with its log.
        assert "attempt 1 line 0\n" in tpujob(space, "logs", "digits", "--failed")

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
