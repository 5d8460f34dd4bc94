"""What a person sees of a running job: a progress bar on a terminal, plain lines elsewhere. Used by `tpujob run`."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import nan
from typing import Protocol

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tpu_training_operator.api.conditions import ConditionType, find
from tpu_training_operator.api.status import State, Status
from tpu_training_operator.local.progress import Evaluation, Report
from tpu_training_operator.local.run import Update

# A line for about every twentieth of the training.
_PLAIN_LINES = 20


class View(Protocol):
    def update(self, update: Update) -> None: ...

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
    with Progress(*columns, console=console, transient=False) as progress:
        yield BarView(progress, progress.add_task("", total=None, state="Starting", numbers=""))


class PlainView:
    """Lines: every change of the state, and a report now and then."""

    def __init__(self) -> None:
        self._message = ""
        self._last_step = 0

    def update(self, update: Update) -> None:
        message = _message(update.status)
        if message and message != self._message:
            self._message = message
            self.say(f"{update.status.state}: {message}")
        for warning in update.warnings:
            self.say(f"warning: {warning}")
        for report in update.reports:
            if report.phase == "training" and self._is_due(report):
                self._last_step = report.step
                self.say(f"step {report.step}/{report.total_steps}  {_numbers(report)}")
            if report.evaluation is not None:
                self.say(_evaluated(report.evaluation, report.total_steps))

    def say(self, text: str) -> None:
        click.echo(text)

    def _is_due(self, report: Report) -> bool:
        # A new attempt starts again from a lower step.
        due = self._last_step + report.total_steps / _PLAIN_LINES
        return report.step >= min(due, report.total_steps) or report.step < self._last_step


class BarView:
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task
        self._message = ""
        self._phase = ""

    def update(self, update: Update) -> None:
        status = update.status
        message = _message(status)
        if message and message != self._message:
            self._message = message
            self.say(f"{status.state}: {message}")
        for warning in update.warnings:
            self.say(f"warning: {warning}")
        # What a gang did before it was restarted is no news of the one that starts.
        self._phase = update.reports[-1].phase if update.reports else self._phase
        is_running = status.state is State.RUNNING
        state = (self._phase.capitalize() if is_running else "") or str(status.state or "Starting")
        self._phase = self._phase if is_running else ""
        total = status.resolved.train_steps if status.resolved else None
        self._progress.update(self._task, state=state, total=total)
        for report in update.reports:
            self._progress.update(self._task, completed=report.step, total=report.total_steps, numbers=_numbers(report))
            if report.evaluation is not None:
                self.say(_evaluated(report.evaluation, report.total_steps))

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)


def _message(status: Status) -> str:
    """The first line; a user's whole traceback is shown at the end."""
    ready = find(status.conditions, ConditionType.READY)
    return ready.message.partition("\n")[0] if ready else ""


def _evaluated(evaluation: Evaluation, total_steps: int) -> str:
    metrics = (f"{name} {nan if value is None else value:.6g}" for name, value in evaluation.metrics.items())
    return "  ".join((f"step {evaluation.step}/{total_steps}", "evaluated:", *metrics))


def _numbers(report: Report) -> str:
    # The trainer writes None for a loss that is NaN or infinite, which is the loss that nobody must miss.
    loss = f"loss {nan if report.loss is None else report.loss:.4g}" if report.losses or report.loss is not None else ""
    speed = f"{report.examples_per_second:.0f} examples/s" if report.examples_per_second else ""
    return "  ".join(part for part in (loss, speed) if part)
