"""`python -m tpu_trainer slice-check MODE`: a host's part of the slice check (`tpu_contract.slice_check`).

First the hosts look at their pods and at the network between them, which takes no chip. Then the trainer's own
processes start, and each replica checks its chip.
"""

from __future__ import annotations

import copy
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from tpu_contract import protocol
from tpu_contract.protocol import ExitCode
from tpu_contract.slice_check import (
    ENV_EXPECTED_CHIPS,
    FAST_SECONDS,
    CheckMode,
    LineVerdict,
    SliceCheckLine,
    SliceSection,
    SliceTable,
    expected_from_json,
    from_json,
    line_to_json,
    to_json,
)
from tpu_trainer.checks.slice.lines import CheckedHost, attempt, end_if_failed, judge, merge, pod_of, print_table, timed
from tpu_trainer.checks.slice.network import HostMeeting, check_network, used_ports
from tpu_trainer.checks.slice.pod import check_pod
from tpu_trainer.checks.slice.storage import check_storage
from tpu_trainer.contract.clock import process_seconds
from tpu_trainer.contract.environment import check_agreement, read_environment, read_run_spec
from tpu_trainer.contract.errors import BadSpecError, PeerLostError
from tpu_trainer.contract.outcome import Outcome, outcome_of
from tpu_trainer.contract.stop import StopSignal
from tpu_trainer.worker.entry import end, import_no_device_libraries, run_host

if TYPE_CHECKING:
    from tpu_trainer.loop.context import RunContext

_REPORTS = (protocol.ENV_PROGRESS_URL, protocol.ENV_KUBEFLOW_URL, protocol.ENV_REPORT_DIRECTORY)
_NETWORK_SECONDS, _PORT_SECONDS = 120.0, 10.0

COME_SECONDS = 300.0
"""How long a replica waits for the others before a collective, which itself would wait for ever."""

PHASE_SECONDS = 600.0
"""How long a phase may last, which compiles its programs first: a device that hangs cannot be interrupted."""


def main(arguments: Sequence[str]) -> int:
    """Runs this host's part and returns the exit code; always leaves a termination message."""
    mode, *command = arguments or [""]
    if mode == CheckMode.FAST and command:
        return _check_and_become(command)
    stop = StopSignal()
    stop.install()
    try:
        if mode not in tuple(CheckMode):
            raise BadSpecError(f"slice-check: the mode is {' or '.join(CheckMode)}, got {mode!r}")
        outcome = SliceProbe(CheckMode(mode)).run(stop)
    except Exception as error:
        outcome = outcome_of(error)
    end(outcome)
    return outcome.code


def _check_and_become(command: Sequence[str]) -> int:
    """Checks in a process of its own, which gives the chips back, and becomes the command if the slice passes."""
    # The reports and the last words are the command's own, if the slice passes.
    environ = {name: value for name, value in os.environ.items() if name not in _REPORTS}
    check = [sys.executable, "-m", "tpu_trainer", "slice-check", CheckMode.FAST_ONLY]
    process = subprocess.Popen(check, env=environ)  # noqa: S603
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    if code := process.wait():
        return code if code > 0 else 128 - code
    if path := os.environ.get(protocol.ENV_TERMINATION_LOG):
        with suppress(OSError):
            os.truncate(path, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return os.execvp(command[0], list(command))  # noqa: S606


class SliceProbe:
    """Finds what can be found before the chips are opened, then starts the replicas, each of which calls its own copy.

    hosts: all of them, with their nodes once they have met. lines, seconds: what was found, and the time of each phase.
    context: a replica's.
    """

    context: RunContext

    def __init__(self, mode: CheckMode) -> None:
        self.is_full, self._mode = mode is CheckMode.FULL, mode
        self._environment = read_environment(os.environ)
        self.spec = read_run_spec(self._environment.run_spec, own_loop=True)
        check_agreement(self._environment, self.spec)
        self.chips = expected_from_json(os.environ.get(ENV_EXPECTED_CHIPS, ""))
        self.me = CheckedHost.of(os.environ, self.spec, self._environment.host_index)
        self.hosts = [CheckedHost(index, pod_of(self.spec, index)) for index in range(self.spec.slice.hosts)]
        self.lines: list[SliceCheckLine] = []
        self.seconds: dict[str, float] = {}
        self._prints, self._printed = self.me.index == 0 and self.is_full, Path(os.devnull)

    def run(self, stop: StopSignal) -> Outcome:
        """Runs this host's part. Raises TrainerError: it could not, or lines have failed before the chips' turn."""
        with timed(self.seconds, "pod"):
            self.lines += self.me.lines(check_pod(self.spec, self.chips, os.environ, is_full=self.is_full))
        if not self.is_full:
            end_if_failed(self.lines, self.me.pod)
        import_no_device_libraries(self.spec)
        try:
            self._look_around(stop)
        except PeerLostError as error:
            self._add_absent(SliceSection.NETWORK, "workers", error)
            end_if_failed(self.lines, self.me.pod)
            raise
        bars = (SliceSection.POD, SliceSection.NETWORK)
        if failed := [line for line in self.lines if line.verdict is LineVerdict.FAILED and line.section in bars]:
            advice = f"{failed[0].name} has failed on {failed[0].place}"
            rest = (SliceSection.CHIPS, SliceSection.RUN)
            self.lines += [judge(section, "all of it", None, advice=advice) for section in rest]
            self._print()
            end_if_failed(failed, self.me.pod)
        with tempfile.TemporaryDirectory(prefix="slice-check-") as folder:
            # A replica's process tells so that it has printed the table.
            self._printed = Path(folder) / "printed"
            outcome = run_host(os.environ, stop, self)
            if not self._printed.exists() and outcome.code is not ExitCode.Preempted:
                reason = f"{outcome.code.name}: {outcome.message}"
                line = judge(SliceSection.CHIPS, "start", False, reason, advice="look at the log")
                self.lines += self.me.lines([line])
                self._print()
        return outcome

    def _look_around(self, stop: StopSignal) -> None:
        """Meets the other hosts. Then every host has the lines of all."""
        # Imported only now: what a pod lacks is said before torch is imported.
        from tpu_trainer.gang.backends.rendezvous import Seat, meet

        spec, environment, me = self.spec, self._environment, self.me
        with timed(self.seconds, "meeting"):
            store = meet(environment, f"{spec.job.gang}/check", stop, Seat.of_host(environment))
        meeting = HostMeeting(store, spec, me.index)
        del store
        self.hosts = [CheckedHost(**host) for host in meeting.exchange("host", asdict(me))]
        if len(self.hosts) > 1:
            # Half of the time, so that there is some for the chips.
            until = time.monotonic() + (_NETWORK_SECONDS if self.is_full else FAST_SECONDS / 2)
            ports = used_ports(spec, me.index)
            with timed(self.seconds, "network"):
                found = lambda: check_network(meeting, self.hosts, ports, until)  # noqa: E731
                self.lines += me.lines(attempt(SliceSection.NETWORK, "names and ports", found))
        if self.is_full:
            with timed(self.seconds, "storage"):
                self.lines += me.lines(attempt(SliceSection.STORAGE, "storage", lambda: check_storage(spec, me)))
        mine = to_json(SliceTable(tuple(self.lines)))
        self.lines = list(from_json(meeting.exchange("lines", mine, _merged)).lines)
        meeting.leave()
        if len(self.hosts) > 1 and me.index == 0:
            _await_free(environment.master_port)

    def __call__(self, context: RunContext) -> Outcome:
        """Measures the chips, as a replica. A fast check then ends the hosts of failed lines, or trains; the full one
        tries the whole line and prints the table."""
        check = copy.copy(self)
        check.context, check._prints = context, context.outputs.is_reporter and self.is_full
        check.lines, check.seconds = [*self.lines], {**self.seconds, "start": process_seconds() or 0.0}
        try:
            check._measure()
        except PeerLostError as error:
            check._add_absent(SliceSection.CHIPS, "replicas", error)
            raise
        return check._end()

    def _measure(self) -> None:
        from tpu_trainer.checks.slice.chips import check_chips
        from tpu_trainer.checks.slice.whole_line import check_whole_line

        until = math.inf if self.is_full else time.monotonic() + FAST_SECONDS - self._spent
        self._try(SliceSection.CHIPS, "chips", lambda: check_chips(self, until))
        if self.is_full:
            self._try(SliceSection.RUN, "the whole line", lambda: check_whole_line(self))

    @property
    def _spent(self) -> float:
        """The seconds of the measurements of the fast half."""
        return sum(self.seconds.get(phase, 0.0) for phase in ("pod", "network", "chips"))

    def _end(self) -> Outcome:
        from tpu_trainer.worker.replica import train

        if self.is_full:
            self._print()
            # A process that ends ends the others of its host.
            self.come("the end")
        end_if_failed(self.lines, self.me.pod)
        untold = [str(line) for line in merge(self.lines) if line.verdict is LineVerdict.NOT_TRIED]
        without = f", {len(untold)} of them without a verdict: {'; '.join(untold)}" if untold else ""
        passed = f"the slice passed its check of {len(self.lines)} lines in {self._spent:.1f} s{without}"
        self.context.outputs.progress.say(passed)
        return train(self.context) if self._mode is CheckMode.FAST else Outcome(ExitCode.Succeeded, passed)

    def _try(self, section: SliceSection, name: str, probe: Callable[[], Iterable[SliceCheckLine]]) -> None:
        """Adds the lines of a phase. Ends the process if it does not end in time, with the table of what was found."""

        def give_up() -> None:
            advice = "a chip or a link hangs: leave this node out, and have it repaired"
            line = judge(section, name, False, f"no answer within {PHASE_SECONDS:.0f} s", "an answer", advice)
            (own,) = self.me.lines([line])
            self.lines.append(own)
            self._print()
            self.context.die(Outcome(ExitCode.SliceUnfit, str(own), slice_check=line_to_json(own)))

        timer = threading.Timer(PHASE_SECONDS, give_up)
        timer.daemon = True
        timer.start()
        try:
            with timed(self.seconds, name):
                self.lines += attempt(section, name, probe)
        finally:
            timer.cancel()

    def come(self, name: str) -> None:
        """Returns once all replicas have come. Raises PeerLostError, which names the hosts that did not."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        backend = self.context.backend
        if backend.store is None:
            return
        store = PrefixStore(f"slice-check/{name}", backend.store)
        store.set(str(backend.rank), str(self.me.index))
        if store.add("count", 1) == backend.world:
            store.set("all", "")
        try:
            store.wait(["all"], timedelta(seconds=COME_SECONDS))
        except RuntimeError as error:
            came = {int(store.get(str(rank))) for rank in range(backend.world) if store.check([str(rank)])}
            absent = [host for host in self.hosts if host.index not in came]
            pods = ", ".join(host.pod for host in absent) or "a process of a host"
            text = f"slice check: {pods} did not come to {name} within {COME_SECONDS:.0f} s"
            raise PeerLostError(text, absent=[host.index for host in absent]) from error

    def _add_absent(self, section: SliceSection, who: str, error: PeerLostError) -> None:
        """Adds a line of each host that did not come, and prints the table."""
        advice = "look at its log, and at what lies between: DNS, a NetworkPolicy, a firewall; else leave its node out"
        line = judge(section, f"all {who} come", False, str(error), "all of them", advice)
        # A host that does not find the meeting knows nobody else to blame.
        alone = self.me.lines([line]) if section is SliceSection.NETWORK else [line]
        self.lines += [own for index in error.absent for own in self.hosts[index].lines([line])] or alone
        self._print()

    def _print(self) -> None:
        if self._prints:
            print_table(self.lines, self.seconds)
            self._printed.touch()


def _merged(tables: Sequence[str]) -> str:
    """Returns the lines of all tables in one."""
    return to_json(SliceTable(tuple(merge(line for text in tables for line in from_json(text).lines))))


def _await_free(port: int) -> None:
    """Waits until the first meeting has given its port back, which the trainer's own takes next."""
    until = time.monotonic() + _PORT_SECONDS
    while time.monotonic() < until:
        try:
            socket.create_server(("", port)).close()
            return
        except OSError:
            time.sleep(0.05)
