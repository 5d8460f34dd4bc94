"""What each replica does in a slice check: it measures its chip and the way to the others, and then trains."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from tpu_contract.protocol import ExitCode
from tpu_contract.slice_check import CheckMode, ExpectedChips, SliceCheckLine, SliceSection, line_to_json
from tpu_trainer.checks.slice.chips import check_chips
from tpu_trainer.checks.slice.lines import CheckedHost, attempt, end_if_failed, judge, print_table
from tpu_trainer.checks.slice.whole_line import check_whole_line
from tpu_trainer.contract.clock import process_seconds
from tpu_trainer.contract.errors import PeerLostError
from tpu_trainer.contract.outcome import Outcome
from tpu_trainer.loop.context import RunContext
from tpu_trainer.worker.replica import train

COME_SECONDS = 300.0
"""How long a replica waits for the others before a collective, which itself would wait for ever."""

PHASE_SECONDS = 600.0
"""How long a phase may last, which compiles its programs first: a device that hangs cannot be interrupted."""


@dataclass(frozen=True)
class ReplicaCheck:
    """Measures the chips. The fast check then ends the hosts of failed lines, or trains if `trains`; the full one tries
    the whole line and prints the table, after which the file `printed` exists.

    lines, seconds: what the hosts have found before.
    """

    mode: CheckMode
    chips: ExpectedChips
    hosts: tuple[CheckedHost, ...]
    lines: tuple[SliceCheckLine, ...]
    seconds: Mapping[str, float]
    printed: Path
    trains: bool

    def __call__(self, context: RunContext) -> Outcome:
        check = _RunningCheck(self, context)
        check.seconds["start"] = process_seconds() or 0.0
        try:
            check.measure()
        except PeerLostError as error:
            advice = "look at its log; if it has none of this, leave its node out"
            line = judge(SliceSection.CHIPS, "all replicas come", False, str(error), "all replicas come", advice)
            check.lines += [own for index in error.absent for own in self.hosts[index].lines([line])] or [line]
            check.print_table(complete=False)
            raise
        if self.mode is CheckMode.FULL:
            check.print_table(complete=True)
            # A process that ends ends the others of its host.
            check.come("the end")
        end_if_failed(check.lines, self.hosts[context.environment.host_index].pod)
        passed = f"the slice passed its check of {len(check.lines)} lines"
        context.outputs.progress.say(passed)
        return train(context) if self.trains else Outcome(ExitCode.Succeeded, passed)


@dataclass
class _RunningCheck:
    task: ReplicaCheck
    context: RunContext
    lines: list[SliceCheckLine] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lines += self.task.lines
        self.seconds |= self.task.seconds

    def measure(self) -> None:
        context, task, index = self.context, self.task, self.context.environment.host_index
        job, kept = context.spec.job, context.spec.checkpoint
        folder = f"{tempfile.gettempdir()}/{job.uid}" if kept is None else kept.uri.rstrip("/")
        self._try(
            SliceSection.CHIPS,
            "chips",
            lambda: check_chips(context.backend, context.spec, task.chips, task.hosts, index, task.mode, self.come),
        )
        if task.mode is CheckMode.FULL:
            place = f"{folder}/slice-check-{job.attempt}"
            self._try(
                SliceSection.RUN, "the whole line", lambda: check_whole_line(context, place, self.seconds, self.come)
            )

    def _try(self, section: SliceSection, name: str, probe: Callable[[], Iterator[SliceCheckLine]]) -> None:
        with self._phase(section, name):
            self.lines += attempt(section, name, probe)

    def come(self, name: str) -> None:
        """Returns once all replicas have come. Raises PeerLostError, which names the hosts that did not."""
        backend, hosts = self.context.backend, self.task.hosts
        if backend.store is None:
            return
        store = PrefixStore(f"slice-check/{name}", backend.store)
        store.set(str(backend.rank), str(self.context.environment.host_index))
        if store.add("count", 1) == backend.world:
            store.set("all", "")
        try:
            store.wait(["all"], timedelta(seconds=COME_SECONDS))
        except RuntimeError as error:
            came = {int(store.get(str(rank))) for rank in range(backend.world) if store.check([str(rank)])}
            absent = [host.index for host in hosts if host.index not in came]
            pods = ", ".join(hosts[index].pod for index in absent) or "a process of a host"
            text = f"slice check: {pods} did not come to {name} within {COME_SECONDS:.0f} s"
            raise PeerLostError(text, absent=absent) from error

    def print_table(self, *, complete: bool) -> None:
        if self.context.outputs.is_reporter and self.task.mode is CheckMode.FULL:
            print_table(self.lines, self.seconds, self.task.chips.accelerator_type, complete=complete)
            self.task.printed.touch()

    @contextmanager
    def _phase(self, section: SliceSection, name: str) -> Iterator[None]:
        """Ends the process if the block does not end in time; then the table has what was found until then."""

        def give_up() -> None:
            advice = "a chip or a link hangs: leave this node out, and have it repaired"
            line = judge(section, name, False, f"no answer within {PHASE_SECONDS:.0f} s", "an answer", advice)
            (own,) = self.task.hosts[self.context.environment.host_index].lines([line])
            self.lines.append(own)
            self.print_table(complete=False)
            self.context.die(Outcome(ExitCode.SliceUnfit, str(own), slice_check=line_to_json(own)))

        began, timer = time.monotonic(), threading.Timer(PHASE_SECONDS, give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self.seconds[name] = time.monotonic() - began
