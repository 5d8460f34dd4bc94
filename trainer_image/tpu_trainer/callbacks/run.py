"""An open session inside of a job: what its processes report, and how they decide to stop."""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

from tpu_contract.protocol import ENV_KUBEFLOW_URL, Check, ExitCode, Phase
from tpu_contract.run_spec import NO_ENTRYPOINT, NotFinitePolicy, RunSpec
from tpu_trainer.callbacks.ending import ExitHook, outcome_of_loop
from tpu_trainer.callbacks.stop import Agree, Agreement, StopRequest, count_xla_devices, torch_store, world_size
from tpu_trainer.contract.clock import Clock, StepPace, process_seconds
from tpu_trainer.contract.environment import check_agreement, read_environment, read_run_spec
from tpu_trainer.contract.errors import BadSpecError, NotFiniteError, PreemptedError, UserCodeError
from tpu_trainer.contract.findings import Finding
from tpu_trainer.contract.outcome import Outcome, write_last_words
from tpu_trainer.reporting.heartbeat import open_heartbeat
from tpu_trainer.reporting.history import Sample
from tpu_trainer.reporting.loss_trend import LossTrend
from tpu_trainer.reporting.progress import ProgressLog
from tpu_trainer.reporting.report import present_report
from tpu_trainer.reporting.reporter import open_reporter
from tpu_trainer.reporting.run_outputs import RunOutputs
from tpu_trainer.reporting.throughput import Throughput

_PYTHONS_OWN = (ExitCode.Succeeded, ExitCode.UserError)
"""The exit codes that Python sets itself: at the end of the program, and after an exception."""

_SAY_LENGTH = "give session(total_steps=...), or change the recipe"
_NOTHING = "the session ended without a step: nothing was trained, or run.step was not called"

_LOSS = "evaluation_loss"
_RENAMED = f'the metric "loss" is called "{_LOSS}" in the result: "loss" is the training loss that each step reports'

REPORT_SECONDS = 5.0
REPORT_EVERY = 10
"""Seconds and calls of `step` between two readings of the losses, whichever comes first."""


class Run:
    """`stopping`: a stop was requested, and all processes have agreed that the last reported step is their last."""

    def __init__(self, total_steps: int | None, global_batch_size: int | None, agree: Agree | None) -> None:
        environment = read_environment(os.environ)
        spec = read_run_spec(environment.run_spec, own_loop=True)
        check_agreement(environment, spec)
        if spec.entrypoint != NO_ENTRYPOINT:
            raise BadSpecError("tpu_trainer.callbacks is for trainer.command; with an entrypoint the trainer reports")
        # Callbacks for Kubeflow would report the same steps, without the checkpoints and phases.
        os.environ.pop(ENV_KUBEFLOW_URL, None)
        batch = replace(spec.batch, total=global_batch_size or spec.batch.total)
        self._spec = spec = replace(spec, train_steps=total_steps or spec.train_steps, batch=batch)
        self._recipes_length = total_steps is None
        self.stopping = False
        self._stop_request = StopRequest()
        self._agreement = Agreement(self._stop_request, agree, torch_store)
        # A loop with its own way to agree has its own way to meet.
        self._may_be_apart = agree is None
        self._clock, self._pace, self._losses = Clock(before=process_seconds() or 0.0), StepPace(), Losses()
        self._begun, self._known = False, 0
        self._throughput = Throughput(batch.total)
        self._metrics: dict[str, float] = {}
        self._learning_rate = math.nan
        self._learning_rates: dict[int, float] = {}
        self._warned = False
        self._reported, self._split = time.monotonic(), self._clock.seconds()
        self._first = place_on_host(os.environ) == 0
        is_reporter = environment.host_index == 0 and self._first
        self._progress = _SilentProgressLog(spec.train_steps, silent=not is_reporter)
        service = environment.progress_service if is_reporter else None
        packages = environment.packages_sha256
        heartbeat = open_heartbeat(
            service, lambda: present_report(spec, self._clock, self._pace, self._progress, None, packages)
        )
        reporter = open_reporter(spec, environment.report_directory, self._clock, "", reports=is_reporter)
        self._outputs = RunOutputs(self._progress, reporter, heartbeat, is_reporter, LossTrend(spec.warmup_steps))
        self._stop_request.listen()
        self._uncaught_before = sys.excepthook
        sys.excepthook = self._uncaught
        self._exit_hook = ExitHook(self._left)
        self._exit_hook.listen()

    def step(self, step: int, loss: Any, metrics: Mapping[str, Any], learning_rate: float | None) -> None:
        if self._begun:
            self._clock.enter(Phase.HOST)
        else:
            self._begin(step - 1)
        self._pace.step_done(step)
        self._progress.step = step
        self._throughput.arrived(step, self._training_seconds())
        if loss is not None:
            self._losses.add(step, loss)
        if learning_rate is not None:
            self._learning_rate = learning_rate
            # Without a loss there is no report that would carry it.
            if loss is not None:
                self._learning_rates[step] = learning_rate
        if self._pace.steps % REPORT_EVERY == 0 or time.monotonic() - self._reported >= REPORT_SECONDS:
            self._report(self._losses.read_earlier())
        if metrics:
            self.evaluated(step, metrics)
        self.stopping = self._agreement.reached(step, self._pace.median_seconds)

    def record(self, step: int, loss: Any, learning_rate: float | None) -> None:
        self._losses.add(step, loss)
        if learning_rate is not None:
            self._learning_rate = self._learning_rates[step] = learning_rate
        self._report(self._losses.read_earlier())

    def evaluated(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._clock.enter(Phase.HOST)
        self._metrics = self._rename_loss(step, metrics)
        self._outputs.add_evaluation(step, self._metrics)

    def evaluation_goes_on(self) -> None:
        self._clock.enter(Phase.EVALUATE)

    def checkpoint(self, step: int) -> None:
        if self._begun:
            self._progress.checkpoint_step = step
        else:
            self._progress.resume(step, "")

    def evaluating(self) -> AbstractContextManager[object]:
        return self._clock.during(Phase.EVALUATE)

    def saving(self) -> AbstractContextManager[object]:
        return self._clock.during(Phase.CHECKPOINT)

    def end(self, error: BaseException | None) -> None:
        """Ends the session, as `Session.end` describes."""
        if isinstance(error, SystemExit) and error.code in (None, 0):
            # Treated as the end of the block: a stop may have been requested, and the last losses are still to be read.
            error = None
        outcome = self._close(error)
        if outcome.code is ExitCode.Succeeded:
            sys.excepthook = self._uncaught_after
        if outcome.code in _PYTHONS_OWN or isinstance(error, SystemExit):
            return
        if error is not None:
            traceback.print_exception(error)
        print(f"{outcome.code.name}: {outcome.message.splitlines()[-1]}", file=sys.stderr, flush=True)
        raise SystemExit(int(outcome.code))

    def _uncaught(self, kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        """Handles an exception that ends the process while the session is open, and that no callback sees."""
        before = self._uncaught_before
        outcome = self._close(error)
        before(kind, error, frames)
        if outcome.code not in _PYTHONS_OWN:
            raise SystemExit(int(outcome.code))

    def _uncaught_after(self, kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        """Handles an exception after the training, as in an export, whose cause the message of success would hide."""
        write_last_words(outcome_of_loop(error, self._progress.step), first=self._first)
        self._uncaught_before(kind, error, frames)

    def _left(self) -> int:
        """Returns the exit code of a process that leaves by os._exit(0)."""
        done, total = self._done or 0, self._spec.train_steps
        error = None
        if done < total and not self.stopping:
            message = f"os._exit(0) ended the process after step {done} of {total}, while its session was open"
            error = PreemptedError(message) if self._stop_request() else UserCodeError(message)
        outcome = self._close(error)
        if error is not None:
            print(f"{outcome.code.name}: {outcome.message}", file=sys.stderr, flush=True)
        return int(outcome.code)

    def evaluated_after(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Puts the metrics of an evaluation after the training into the result."""
        self._metrics = self._rename_loss(step, metrics)
        outcome = self._outcome(None)
        write_last_words(outcome, first=self._first)
        self._outputs.add_evaluation(step, self._metrics)
        self._outputs.reporter.end(outcome)

    def _rename_loss(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Returns the metrics, with one called "loss" renamed: that name is the training loss's."""
        numbers = dict(_numbers(metrics))
        if "loss" in numbers:
            numbers = {(_LOSS if name == "loss" and _LOSS not in numbers else name): v for name, v in numbers.items()}
            numbers.pop("loss", None)
            self._outputs.add_finding(Finding("Evaluation", step, _RENAMED))
        return numbers

    def _close(self, error: BaseException | None) -> Outcome:
        self._stop_request.forget()
        self._exit_hook.forget()
        sys.excepthook = self._uncaught_before
        if error is None:
            error = self._read_last_losses()
        outcome = self._outcome(error)
        write_last_words(outcome, first=self._first)
        if outcome.code is ExitCode.Succeeded:
            self._compare_length(outcome.step or 0)
        self._outputs.end(outcome)
        return outcome

    def _compare_length(self, done: int) -> None:
        """Warns if the number of steps is not the recipe's: a loop that ends early by mistake is a success, too."""
        total = self._spec.train_steps
        if not self._begun and done < total:
            self._outputs.add_finding(Finding("NothingTrained", done, _NOTHING))
        elif self._recipes_length and done != total:
            text = (
                f"the loop ended after step {done}, and the recipe has {total} steps: if that is right, {_SAY_LENGTH}"
            )
            self._outputs.add_finding(Finding("Length", done, text))

    def _begin(self, step: int) -> None:
        self._begun, self._known = True, step
        self._throughput = Throughput(self._spec.batch.total, step)
        self._clock.enter(Phase.HOST)
        self._reported, self._split = time.monotonic(), self._clock.seconds()
        self._outputs.begin(step)
        warning = warn_of_separate_models(self._spec) if self._may_be_apart else None
        if warning is not None:
            self._outputs.add_finding(Finding("SeparateModels", step, warning))

    def _training_seconds(self) -> float:
        spent = self._clock.seconds()
        return sum(spent.values()) - spent[Phase.EVALUATE] - spent[Phase.CHECKPOINT]

    def _report(self, losses: Sequence[tuple[int, float]]) -> None:
        """Reports the losses that have been read.

        Raises:
            NotFiniteError: a loss is not finite, and the recipe's onNotFinite is Stop.
        """
        now, seconds = time.monotonic(), self._clock.seconds()
        if losses:
            curve: list[float] = []
            for step, loss in losses:
                # A loss that is reported every ten steps stands for ten.
                curve += [loss] * max(1, step - self._known)
                self._known = step
            sample = Sample(
                step=losses[-1][0],
                losses=tuple(curve),
                learning_rate=self._learning_rate,
                seconds=now - self._reported,
                split={phase: seconds[phase] - self._split[phase] for phase in Phase},
                examples_per_second=self._throughput.rate,
                learning_rates=dict(self._learning_rates),
            )
            self._learning_rates.clear()
            self._outputs.add_sample(sample, self._progress.checkpoint_step)
            self._reported, self._split = now, seconds
        self._judge(losses)

    def _judge(self, losses: Sequence[tuple[int, float]]) -> None:
        broken = next(((step, loss) for step, loss in losses if not math.isfinite(loss)), None)
        if broken is None:
            return
        step, loss = broken
        message = f"the loss of step {step} is {loss}"
        if self._spec.on_not_finite is NotFinitePolicy.STOP:
            raise NotFiniteError(f"{message}; recipe.onNotFinite is Stop", step)
        if not self._warned:
            self._warned = True
            self._outputs.add_finding(Finding(Check.NOT_FINITE, step, message))

    def _read_last_losses(self) -> BaseException | None:
        """Reads the remaining losses; returns the error if one is not finite and ends the run."""
        try:
            self._report(self._losses.read_all())
        except NotFiniteError as error:
            return error
        return None

    @property
    def _done(self) -> int | None:
        return self._progress.step if self._pace.last is None else self._pace.last

    def _outcome(self, error: BaseException | None) -> Outcome:
        step = self._done
        if error is not None:
            return replace(outcome_of_loop(error, step), checkpoint_step=self._progress.checkpoint_step)
        code = ExitCode.Preempted if self.stopping else ExitCode.Succeeded
        ending = f"stopped on request after {step} steps" if self.stopping else f"trained {step or 0} steps"
        loss = {} if self._losses.newest is None else {"loss": self._losses.newest}
        metrics = loss | self._metrics
        values = "".join(f", {name} {value:.6g}" for name, value in metrics.items())
        rate, saved = self._throughput.rate, self._progress.checkpoint_step
        return Outcome(code, ending + values, step, metrics, rate, checkpoint_step=saved)


def warn_of_separate_models(spec: RunSpec) -> str | None:
    """Returns a warning if what joins the hosts (torch.distributed with backend Torch, otherwise torch_xla) has joined
    fewer. Nothing else notices: each of them learns, and the job succeeds with the model of one of them."""
    hosts, joined = spec.slice.hosts, None
    if spec.backend == "torch":
        joins, joined, wanted, unit = "torch.distributed", world_size(), hosts, "processes"
        remedy = (
            "Start the script with torchrun, without --standalone and --nnodes, and check that it calls"
            " init_process_group"
        )
    else:
        joins, joined, wanted, unit = "torch_xla", count_xla_devices(), spec.slice.replicas, "devices"
        remedy = "Check that the script calls torch_xla.launch and trains on torch_xla's device"
    if hosts == 1 or joined is None or joined >= wanted:
        return None
    of_devices = "" if wanted == hosts else f" with {wanted} {unit}"
    return (
        f"{joins} joins {joined if joined > 1 else 'no'} {unit}, and the job has {hosts} hosts{of_devices}: each host"
        f" trains its own model, unless the hosts exchange gradients in another way. {remedy} (docs/command.md)"
    )


class Losses:
    """The losses that are still to be read, in the order of their steps. `newest`: the last one that was read."""

    def __init__(self) -> None:
        self.newest: float | None = None
        self._waiting: list[tuple[int, Any]] = []

    def add(self, step: int, loss: Any) -> None:
        """Adds a loss. Raises ValueError for a tensor with more than one element."""
        if hasattr(loss, "numel") and loss.numel() != 1:
            raise ValueError(f"step {step}: the loss must be a number or a tensor with one element, got {loss.numel()}")
        self._waiting.append((step, loss.detach() if hasattr(loss, "detach") else loss))

    def read_earlier(self) -> list[tuple[int, float]]:
        """Reads all losses but the newest, if that is on a device.

        The device may still be computing it, and torch_xla would cut a step in two, differently on each process.
        """
        pending = bool(self._waiting) and _on_device(self._waiting[-1][1])
        return self._read(len(self._waiting) - pending)

    def read_all(self) -> list[tuple[int, float]]:
        return self._read(len(self._waiting))

    def _read(self, count: int) -> list[tuple[int, float]]:
        losses = [(step, float(loss)) for step, loss in self._waiting[:count]]
        del self._waiting[:count]
        if losses:
            self.newest = losses[-1][1]
        return losses


class _SilentProgressLog(ProgressLog):
    """A progress log without lines: the user's own loop has its own log."""

    def say(self, line: str) -> None:
        pass


def place_on_host(environ: Mapping[str, str]) -> int:
    """Returns this process's index on its host, as torchrun or torch_xla's launcher sets it; 0 if it is alone."""
    text = environ.get("LOCAL_RANK") or environ.get("PJRT_LOCAL_PROCESS_RANK") or "0"
    return int(text) if text.isdecimal() else 0


def _numbers(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the metrics that are numbers: a confusion matrix among them should not end the training."""
    for name, value in metrics.items():
        with suppress(TypeError, ValueError, RuntimeError):
            yield name, float(value)


def _on_device(loss: Any) -> bool:
    device = getattr(loss, "device", None)
    return device is not None and getattr(device, "type", "cpu") != "cpu"
