"""What `tpujob run` shows while the job runs: a progress bar on a terminal, plain lines elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from tpu_training_operator.api.conditions import ConditionType, find
from tpu_training_operator.api.status import Progress, State, Status

# A line for about every twentieth of the training.
_PLAIN_LINES = 20


class View(Protocol):
    def update(self, status: Status) -> None: ...

    def say(self, text: str) -> None: ...


@contextmanager
def view(console: Console) -> Iterator[View]:
    """The view that fits the console, for as long as the job runs."""
    if not console.is_terminal:
        yield PlainView()
        return
    columns = (
        TextColumn("[bold]{task.fields[state]}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console, transient=False) as bar:
        yield BarView(bar, bar.add_task("", total=None, state="Starting", numbers=""))


class _News:
    """The lines that a status adds to the ones before: state, warnings, evaluations."""

    def __init__(self) -> None:
        self._message = ""
        self._warnings: set[str] = set()
        self._metrics: dict[str, str] = {}

    def of(self, status: Status) -> Iterator[str]:
        ready = find(status.conditions, ConditionType.READY)
        # Only the first line: the user's whole traceback is shown at the end.
        message = ready.message.partition("\n")[0] if ready else ""
        if message and message != self._message:
            self._message = message
            yield f"{status.state}: {message}"
        if (progress := status.progress) is None:
            return
        for warning in progress.warnings:
            if warning not in self._warnings:
                self._warnings.add(warning)
                yield f"warning: {warning}"
        # The metrics at the end are part of the summary.
        if status.completion_time is None and progress.metrics != self._metrics:
            self._metrics = dict(progress.metrics)
            metrics = (f"{name} {value}" for name, value in progress.metrics.items())
            yield "  ".join((f"step {progress.step}/{progress.total_steps}", "evaluated:", *metrics))


class PlainView:
    """Lines: every change of the state, and the progress now and then."""

    def __init__(self) -> None:
        self._news = _News()
        self._last_step = 0

    def update(self, status: Status) -> None:
        for line in self._news.of(status):
            self.say(line)
        progress = status.progress
        if progress and progress.phase and status.completion_time is None and self._is_due(progress):
            self._last_step = progress.step
            self.say(f"step {progress.step}/{progress.total_steps}  {_numbers(progress)}")

    def say(self, text: str) -> None:
        click.echo(text)

    def _is_due(self, progress: Progress) -> bool:
        # A new attempt starts again from a lower step.
        step, total = progress.step, progress.total_steps
        return step >= min(self._last_step + total / _PLAIN_LINES, total) or step < self._last_step


class BarView:
    def __init__(self, bar: Bar, task: TaskID) -> None:
        self._news = _News()
        self._bar = bar
        self._task = task

    def update(self, status: Status) -> None:
        for line in self._news.of(status):
            self.say(line)
        progress = status.progress
        phase = progress.phase if progress and status.state is State.RUNNING else None
        total = status.resolved.train_steps if status.resolved else None
        self._bar.update(self._task, state=str(phase or status.state or "Starting"), total=total)
        if progress and progress.phase:
            numbers = _numbers(progress)
            self._bar.update(self._task, completed=progress.step, total=progress.total_steps, numbers=numbers)

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)


def _numbers(progress: Progress) -> str:
    loss = f"loss {float(progress.loss):.4g}" if progress.loss is not None else ""
    speed = f"{float(progress.examples_per_second):.0f} examples/s" if progress.examples_per_second else ""
    return "  ".join(part for part in (loss, speed) if part)
