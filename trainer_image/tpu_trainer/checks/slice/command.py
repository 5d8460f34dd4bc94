"""`python -m tpu_trainer slice-check MODE`: a host's part of the slice check (`tpu_contract.slice_check`).

First the hosts look at their pods and at the network between them, which takes no chip. Then the trainer's own
processes start, and each replica checks its chip (`probe`).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

from tpu_contract.protocol import ENV_KUBEFLOW_URL, ENV_PROGRESS_URL, ENV_REPORT_DIRECTORY, ENV_TERMINATION_LOG
from tpu_contract.run_spec import RunSpec
from tpu_contract.slice_check import (
    ENV_EXPECTED_CHIPS,
    CheckMode,
    LineVerdict,
    SliceCheckLine,
    SliceSection,
    expected_from_json,
    line_from_json,
    line_to_json,
)
from tpu_trainer.checks.slice.lines import CheckedHost, attempt, end_if_failed, judge, pod_of, print_table
from tpu_trainer.checks.slice.network import HostMeeting, check_network, used_ports
from tpu_trainer.checks.slice.pod import check_pod
from tpu_trainer.checks.slice.storage import check_storage
from tpu_trainer.contract.environment import WorkerEnvironment, check_agreement, read_environment, read_run_spec
from tpu_trainer.contract.errors import BadSpecError, PeerLostError
from tpu_trainer.contract.outcome import Outcome, outcome_of
from tpu_trainer.contract.stop import StopSignal
from tpu_trainer.worker.entry import end, import_no_device_libraries, run_host

_FAST_ONLY = "fast-only"
_REPORTS = (ENV_PROGRESS_URL, ENV_KUBEFLOW_URL, ENV_REPORT_DIRECTORY)
_MEETING_SECONDS = 300.0
"""How long a host waits for what another finds out about network and storage."""

_PORT_SECONDS = 10.0


def main(arguments: Sequence[str]) -> int:
    """Runs this host's part and returns the exit code; always leaves a termination message."""
    mode, *command = arguments or [""]
    if mode == CheckMode.FAST and command:
        return _check_and_become(command)
    stop = StopSignal()
    stop.install()
    try:
        if mode not in (*CheckMode, _FAST_ONLY):
            raise BadSpecError(f"slice-check: the mode is {' or '.join(CheckMode)}, got {mode!r}")
        check = _HostCheck(CheckMode.FULL if mode == CheckMode.FULL else CheckMode.FAST, stop)
        outcome = check.run(trains=mode == CheckMode.FAST)
    except Exception as error:
        outcome = outcome_of(error)
    end(outcome)
    return outcome.code


def _check_and_become(command: Sequence[str]) -> int:
    """Checks in a process of its own, which gives the chips back, and becomes the command if the slice passes."""
    # The reports and the last words are the command's own, if the slice passes.
    environ = {name: value for name, value in os.environ.items() if name not in _REPORTS}
    check = [sys.executable, "-m", "tpu_trainer", "slice-check", _FAST_ONLY]
    process = subprocess.Popen(check, env=environ)  # noqa: S603
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    if code := process.wait():
        return code if code > 0 else 128 - code
    if path := os.environ.get(ENV_TERMINATION_LOG):
        with suppress(OSError):
            os.truncate(path, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return os.execvp(command[0], list(command))  # noqa: S606


class _HostCheck:
    """What this host finds, and what all hosts do, before the chips are opened."""

    def __init__(self, mode: CheckMode, stop: StopSignal) -> None:
        self._mode, self._stop = mode, stop
        self._environment: WorkerEnvironment = read_environment(os.environ)
        self._spec: RunSpec = read_run_spec(self._environment.run_spec, own_loop=True)
        check_agreement(self._environment, self._spec)
        self._chips = expected_from_json(os.environ.get(ENV_EXPECTED_CHIPS, ""))
        self._me = CheckedHost.of(os.environ, self._spec, self._environment.host_index)
        self._lines: list[SliceCheckLine] = []
        self._seconds: dict[str, float] = {}

    def run(self, *, trains: bool) -> Outcome:
        """Runs this host's part. Raises TrainerError: it could not, or lines have failed before the chips' turn."""
        me = self._me
        with self._phase("pod"):
            self._lines += me.lines(check_pod(self._spec, self._chips, os.environ, mode=self._mode))
        if self._mode is CheckMode.FAST:
            end_if_failed(self._lines, me.pod)
        import_no_device_libraries(self._spec)
        try:
            hosts = self._look_around()
        except PeerLostError as error:
            self._lines += self._absent(error)
            self._print(complete=False)
            end_if_failed(self._lines, me.pod)
            raise
        bars = (SliceSection.POD, SliceSection.NETWORK)
        if failed := [line for line in self._lines if line.verdict is LineVerdict.FAILED and line.section in bars]:
            advice = f"{failed[0].name} has failed on {failed[0].place}"
            self._lines += [
                judge(section, "not tried", None, advice=advice) for section in (SliceSection.CHIPS, SliceSection.RUN)
            ]
            self._print(complete=True)
            end_if_failed(failed, me.pod)
        # Imported only now: what a pod lacks is said before the libraries are imported.
        from tpu_trainer.checks.slice.probe import ReplicaCheck

        with tempfile.TemporaryDirectory(prefix="slice-check-") as folder:
            printed, lines = Path(folder) / "printed", tuple(self._lines)
            run = ReplicaCheck(self._mode, self._chips, tuple(hosts), lines, self._seconds, printed, trains)
            outcome = run_host(os.environ, self._stop, run)
            if not printed.exists():
                reason = f"{outcome.code.name}: {outcome.message}"
                self._lines += me.lines([judge(SliceSection.CHIPS, "start", False, reason, advice="look at the log")])
                self._print(complete=False)
        return outcome

    def _look_around(self) -> list[CheckedHost]:
        """Meets the other hosts and returns all of them. Then every host has the lines of all."""
        from tpu_trainer.gang.backends.rendezvous import Seat, meet

        spec, environment, me = self._spec, self._environment, self._me
        with self._phase("meeting"):
            store = meet(environment, f"{spec.job.gang}/check", self._stop, Seat.of_host(environment))
        meeting = HostMeeting(store, spec, me.index, _MEETING_SECONDS)
        del store
        hosts = [CheckedHost(**host) for host in meeting.exchange("host", asdict(me))]
        if len(hosts) > 1:
            with self._phase("network"):
                found = attempt(
                    SliceSection.NETWORK,
                    "names and ports",
                    lambda: check_network(meeting, hosts, used_ports(spec, me.index)),
                )
                self._lines += me.lines(found)
        if self._mode is CheckMode.FULL:
            with self._phase("storage"):
                found = attempt(SliceSection.STORAGE, "storage", lambda: check_storage(spec, me))
                self._lines += me.lines(found)
        everywhere = meeting.exchange("lines", [line_to_json(line) for line in self._lines])
        self._lines = [line for of_host in everywhere for line in map(line_from_json, of_host) if line is not None]
        meeting.leave()
        if len(hosts) > 1 and me.index == 0:
            _await_free(environment.master_port)
        return hosts

    def _absent(self, error: PeerLostError) -> list[SliceCheckLine]:
        """Returns the lines of hosts that did not come, or of this one if it did not find host 0."""
        advice = "look at its log, and at what lies between the two: DNS, a NetworkPolicy, a firewall"
        line = judge(SliceSection.NETWORK, "all workers come", False, str(error), "all workers come", advice)
        place = f"{self._me.pod} at {self._environment.master_addr}:{self._environment.master_port}"
        pods = [pod_of(self._spec, index) for index in error.absent]
        absent = [replace(line, host=pod, measured=f"{pod} did not come to {place}") for pod in pods]
        return absent or self._me.lines([line])

    def _print(self, *, complete: bool) -> None:
        if self._mode is CheckMode.FULL and self._me.index == 0:
            print_table(self._lines, self._seconds, self._chips.accelerator_type, complete=complete)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._seconds[name] = time.monotonic() - began


def _await_free(port: int) -> None:
    """Waits until the first meeting has given its port back, which the trainer's own takes next."""
    until = time.monotonic() + _PORT_SECONDS
    while time.monotonic() < until:
        try:
            socket.create_server(("", port)).close()
            return
        except OSError:
            time.sleep(0.05)
