"""One replica's run, from its backend to its outcome: in the host's own process, or in one process per device."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import NoReturn

import torch

from tpu_trainer.backends import open_backend
from tpu_trainer.backends.base import Backend, move_model
from tpu_trainer.board import Board, open_board
from tpu_trainer.checkpoint.catalogue import Found
from tpu_trainer.checkpoint.checkpointer import Checkpointer, Checkpoints
from tpu_trainer.checkpoint.snapshot import hooks_state, restore_model, restore_optimizer
from tpu_trainer.clock import Clock, Phase
from tpu_trainer.contract import ExitCode
from tpu_trainer.data import (
    GENERATORS,
    Order,
    Position,
    Share,
    check_lengths,
    evaluation_size,
    has_length,
    seed_generators,
    size_difference,
    stream_batches,
    train_batches,
)
from tpu_trainer.doctor.doctor import Doctor
from tpu_trainer.doctor.findings import Finding
from tpu_trainer.doctor.hang import Pace, watchdog
from tpu_trainer.entrypoint import Loaded, load_task
from tpu_trainer.environment import WorkerEnvironment
from tpu_trainer.errors import PeerLostError, PreemptedError, StorageError, UserCodeError, user_code
from tpu_trainer.evaluate import evaluate, try_evaluation
from tpu_trainer.hooks import Hooks
from tpu_trainer.instruments import Instruments
from tpu_trainer.logbook import Logbook, closed
from tpu_trainer.loop import Trained, train
from tpu_trainer.optimizers import build_optimizer, refuse_closure, unused
from tpu_trainer.outcome import Outcome, outcome_of
from tpu_trainer.progress import Progress
from tpu_trainer.reporting.heartbeat import open_heartbeat
from tpu_trainer.reporting.report import present_report
from tpu_trainer.schedule import LearningRate
from tpu_trainer.spec import OnNotFinite, RunSpec
from tpu_trainer.stop import SharedStop, StopFlag, StopSignal
from tpu_trainer.storage import Storage, nothing_left, start_of, tell_origin
from tpu_trainer.task import Batch, Hyperparameters, Task
from tpu_trainer.telemetry.rates import NoiseScale, Throughput, Utilisation
from tpu_trainer.telemetry.reporter import open_reporter
from tpu_trainer.telling import Telling
from tpu_trainer.trainable import Growth, Work, enter_training_mode, refuse_lazy
from tpu_trainer.update import Average, count_on_device


def run_replica(
    spec: RunSpec, environment: WorkerEnvironment, stop: StopSignal | SharedStop, die: Callable[[Outcome], NoReturn]
) -> Outcome:
    """Trains and evaluates; every failure becomes an outcome, never an exception.

    `die` ends the process with an outcome when the run hangs, so that this call cannot return.
    """
    clock, pace = Clock(), Pace()
    # By host and place on the host, not by rank: TPU chips are numbered independently of the hosts.
    aloud = environment.host_index == 0 and environment.local_rank == 0
    progress = Progress(spec.train_steps, environment.progress_file, silent=not aloud)
    heartbeat = open_heartbeat(
        environment.progress_service if aloud else None, lambda: present_report(spec, clock, pace, progress)
    )
    # Replaced below: a report names the device.
    telling = Telling(progress, open_reporter(spec, None, clock, "", reports=False), heartbeat, aloud)

    def hung(outcome: Outcome) -> None:
        telling.ended(outcome)
        die(outcome)

    with watchdog(clock, pace, hung, stop.arrived, environment.hang_seconds):
        try:
            backend = open_backend(spec, environment, stop)
            if isinstance(stop, StopSignal):
                # Again: the device's runtime may have replaced our handler.
                stop.install()
            reporter = open_reporter(spec, environment.report_directory, clock, str(backend.device), reports=aloud)
            telling = replace(telling, reporter=reporter)
            with open_board(_board(telling, pace)):
                outcome = _Run(spec, environment, stop, backend, clock, pace, telling).whole()
            # Wait for all: the first to leave would cut the connection of those still in the last collective, or
            # waiting for the last checkpoint. Whatever has become of them, this replica's part is done.
            with clock.during(Phase.CHECKPOINT), suppress(PeerLostError):
                backend.barrier()
                backend.close()
        except Exception as error:
            outcome = outcome_of(error, telling.progress.step)
        telling.ended(outcome)
    return outcome


@dataclass(frozen=True)
class _Run:
    """What all parts of a run need."""

    spec: RunSpec
    environment: WorkerEnvironment
    stop: StopFlag
    backend: Backend
    clock: Clock
    pace: Pace
    telling: Telling

    def whole(self) -> Outcome:
        backend, spec, hp = self.backend, self.spec, Hyperparameters.of(self.spec)
        share = Share(backend.rank, backend.world, backend.local_rank)
        self.telling.progress.starting(
            f"{spec.job.namespace}/{spec.job.name} attempt {spec.job.attempt}, {spec.backend} on {spec.hardware}: "
            f"replicas {spec.slice.replicas}, hosts {spec.slice.hosts}, processes {backend.world}; "
            f"global batch {spec.batch.total}, steps {spec.train_steps}"
        )
        task, hooks = self._load(hp, share)
        try:
            # First: what follows may refuse one process's length and leave the others waiting for it.
            check_lengths(task, backend, self.environment.host_index)
            storage = Storage.of(spec, task.model, backend)
            found = storage.choose(backend, self.environment.host_index, self.telling)
            work, resumed = self._prepare(task, hooks, hp, storage, found), found is not None
            done = nothing_left(work.start, found, hp)
            # As large as the model and its optimizer, and not needed any more.
            del found
            checkpoints = storage.checkpoints(spec, work, self.telling, resumed)
            try:
                return self._train(work, self._instruments(work, checkpoints), share, done)
            finally:
                # However the run ends, a snapshot that was taken is worth writing.
                with self.clock.during(Phase.CHECKPOINT):
                    checkpoints.finish()
                self.telling.progress.committed(checkpoints.last_step)
        except BaseException as error:
            _tell_hooks(hooks, error)
            raise

    def _load(self, hp: Hyperparameters, share: Share) -> Loaded:
        """The task, built with the run's seed: the same on every replica."""
        with GENERATORS:
            seed_generators(hp.seed)
            torch.manual_seed(hp.seed)
            self.backend.seed(hp.seed)
            loaded = load_task(self.spec.entrypoint, hp, share)
        refuse_lazy(loaded.task.model)
        return loaded

    def _prepare(self, task: Task, hooks: Hooks, hp: Hyperparameters, storage: Storage, found: Found | None) -> Work:
        """Model and optimizer on the device, with the checkpoint's state if there is one."""
        tell, say = self.telling.finding, self.telling.progress.say
        difference = size_difference(self.spec.dataset_size, task.train, hp.train_steps, hp.global_batch_size)
        if difference is not None:
            tell(Finding("DatasetSize", 0, difference))
        if task.evaluation is not None and evaluation_size(task) == 0:
            tell(Finding("Evaluation", 0, "the task's evaluation dataset is empty: the result will have no metrics"))
        start = start_of(found, hp, self.spec)
        if found is not None:
            restore_model(found.snapshot, task.model)
        self.backend.place(task.model)
        if (line := enter_training_mode(task.model)) is not None:
            say(line)
        optimizer = build_optimizer(task, hp)
        if not hooks.gives_closure:
            refuse_closure(optimizer)
        if skips := self.spec.on_not_finite is OnNotFinite.SKIP:
            count_on_device(optimizer, self.backend.device)

        def warn(text: str) -> None:
            tell(Finding("Logging", self.pace.last or 0, text))

        growth, logbook = Growth(task.model, optimizer), Logbook(self.backend, warn)
        # Before the optimizer's state is restored: it takes the optimizer's present rates for the recipe's.
        rates = LearningRate(optimizer, hp, start.ramp, own=hooks.own_schedule, tell=tell)
        for text in unused(task, hooks, optimizer, hp):
            tell(Finding("Recipe", start.step, text))
        if found is not None and storage.target is not None:
            growth.load(found.snapshot.document.get("growth"))
            logbook.load(found.snapshot.document.get("logged"))
            restore_optimizer(found.snapshot, optimizer)
            rates.load(found.snapshot.document.get("rates"))
            start = replace(start, ramp=rates.ramp)
            with user_code("restoring the state of the task's hooks"):
                hooks.load(hooks_state(found.snapshot))
            tell_origin(start, found, storage.target.author, hp, self.telling)
        average = None
        if hp.ema_decay is not None:
            average = Average(task.model, hp.ema_decay, self.backend)
            say(f"evaluates the average of the weights, with a decay of {hp.ema_decay:g} per step")
            if found is not None and not found.snapshot.tensors["ema"]:
                say("the checkpoint has no average of the weights: it starts with the checkpoint's weights")
            elif found is not None:
                average.load(found.snapshot.tensors["ema"])
        noise_scale = self.spec.report.gradient_noise_scale
        if noise_scale and self.backend.terms == 1:
            say("no gradient noise scale: it compares the gradients of several processes, and this run has one")
            noise_scale = False
        return Work(task, hooks, hp, optimizer, rates, growth, start, noise_scale, skips, logbook, average)

    def _instruments(self, work: Work, checkpoints: Checkpoints) -> Instruments:
        backend, batch = self.backend, work.hp.global_batch_size
        doctor = Doctor(
            self.spec,
            backend,
            self.clock,
            self.telling.finding,
            model=work.task.model,
            host=self.environment.host_index,
            pace=self.pace,
            health=work.start.health,
            average=None if work.average is None else work.average.tensors,
        )
        return Instruments(
            clock=self.clock,
            doctor=doctor,
            checkpoints=checkpoints,
            throughput=Throughput(batch, work.start.step),
            utilisation=Utilisation(self.spec, backend.terms),
            noise=NoiseScale(batch // backend.world, batch) if work.noise_scale else None,
            telling=self.telling,
            logbook=work.logbook,
            first=work.start.step,
        )

    def _train(self, work: Work, instruments: Instruments, share: Share, done: str | None) -> Outcome:
        """`done`: what to say of a run whose steps were all made before it began."""
        progress, checkpoints = self.telling.progress, instruments.checkpoints
        self.telling.began(work.start.step)
        # Before anything is compiled, which takes minutes; the newest checkpoint stays the newest.
        if any(asked for (asked,) in self.backend.gather([float(self.stop())])):
            raise PreemptedError("stopped on request before the first step")

        def evaluate_now(step: int) -> None:
            with self.clock.during(Phase.EVALUATE), instruments.doctor.set_aside():
                self._evaluate(work, step, share)

        try:
            with user_code("the start of the training"), work.growth.restored():
                work.hooks.fit_begins(work.optimizer, work.start.step)
            # A resumed run has done it before.
            if work.start.step == 0:
                with work.hooks.rehearsal():
                    try_evaluation(work.task, _evaluation_rows(work, share), share, self.backend)
            with self.backend.feed(self._batches(work, share)) as batches, instruments.logbook.open():
                trained = train(work, batches, self.backend, instruments, self.stop, evaluate_now)
            if not trained.stopped:
                instruments.finish_log(trained.step)
        except BaseException:
            instruments.doctor.leave()
            raise
        rate, finiteness = instruments.throughput.rate, instruments.doctor.finiteness
        if trained.stopped:
            safe = _safe(trained.step, checkpoints.last_step) if isinstance(checkpoints, Checkpointer) else ""
            progress.stopped(checkpoints.last_step)
            ending = f"stopped on request after {trained.step} steps"
            return _outcome(ExitCode.Preempted, ending, trained, {}, progress.means, rate, safe + finiteness.summary)
        progress.evaluating(evaluation_size(work.task))
        with self.clock.during(Phase.EVALUATE):
            evaluated = self._evaluate(work, trained.step, share)
        for name, value in evaluated.items():
            if not math.isfinite(value):
                text = f"the metric {name} is {value} after the last step, so the result does not have it"
                self.telling.finding(Finding("Evaluation", trained.step, text))
        with self.clock.during(Phase.CHECKPOINT):
            _keep_last(trained, instruments)
            self._finish(work)
        if (cost := checkpoints.cost).commits:
            progress.say(
                f"{cost.commits} checkpoints, {cost.size / 1e6:.1f} MB; they held up the training for "
                f"{cost.blocked:.1f} s"
            )
        progress.done(checkpoints.last_step)
        ending = done or f"trained {trained.step} steps"
        return _outcome(ExitCode.Succeeded, ending, trained, evaluated, progress.means, rate, finiteness.summary)

    def _batches(self, work: Work, share: Share) -> Iterator[tuple[Batch, Position]]:
        hp, start = work.hp, work.start
        order = Order(hp.global_batch_size, hp.seed, share, hp.accumulation_steps, start.position)
        first, count = start.step * hp.accumulation_steps, (hp.train_steps - start.step) * hp.accumulation_steps
        if has_length(work.task.train):
            return islice(train_batches(work.task, order, first), count)
        return islice(stream_batches(work.task, order, first, self.telling.progress.say), count)

    def _evaluate(self, work: Work, step: int, share: Share) -> dict[str, float]:
        with closed(), nullcontext() if work.average is None else work.average.in_model():
            metrics = evaluate(work.task, _evaluation_rows(work, share), share, self.backend)
        self.telling.evaluated(step, metrics)
        if metrics:
            with user_code("the end of an evaluation"):
                work.hooks.evaluation_ends(step, metrics)
            self.backend.sync()
        return metrics

    def _finish(self, work: Work) -> None:
        """Calls the task's `finish` in the reporting replica; the others wait.

        Raises:
            UserCodeError: in every replica, if it failed.
        """
        if work.task.finish is None:
            return
        failure: UserCodeError | None = None
        if self.telling.aloud:
            try:
                with nullcontext() if work.average is None else work.average.in_model():
                    move_model(work.task.model, torch.device("cpu"))
                    with user_code("the task's finish"):
                        work.task.finish(work.task.model.eval())
            except UserCodeError as error:
                failure = error
        failed = [rank for rank, (bad,) in enumerate(self.backend.gather([float(failure is not None)])) if bad]
        if failure is not None:
            raise failure
        if failed:
            raise UserCodeError("the task's finish failed on worker 0, whose log says why")


def _evaluation_rows(work: Work, share: Share) -> int:
    """As many rows at once as a training pass has: what fits into memory there fits here."""
    return work.hp.global_batch_size // share.world // work.hp.accumulation_steps


def _keep_last(trained: Trained, instruments: Instruments) -> None:
    """The result of the whole training is worth a second attempt, and no later checkpoint would hold it.

    Raises:
        StorageError: it could not be written.
    """
    checkpoints, health = instruments.checkpoints, instruments.doctor.finiteness.health
    if checkpoints.finish() or checkpoints.save_now(trained.step, trained.position, health) is not None:
        return
    newest = "there is none" if checkpoints.last_step is None else f"the newest is of step {checkpoints.last_step}"
    raise StorageError(
        f"all {trained.step} steps are trained, but their checkpoint could not be written, {newest}; the log says why"
    )


def _board(telling: Telling, pace: Pace) -> Board:
    """Where the task's writers write."""
    return Board(
        writes=telling.aloud,
        last_step=lambda: pace.last or 0,
        logged=telling.logged,
        summary=telling.reporter.summary,
        missing=telling.reporter.without_events,
        say=telling.progress.say,
    )


def _tell_hooks(hooks: Hooks, error: BaseException) -> None:
    """What a hook raises about a failure must not take the failure's place."""
    try:
        hooks.failed(error)
    except Exception as raised:
        print(f"the task's hook for failures raised {type(raised).__name__}: {raised}", file=sys.stderr, flush=True)


def _outcome(
    code: ExitCode,
    ending: str,
    trained: Trained,
    evaluated: Mapping[str, float],
    logged: Mapping[str, float],
    rate: float | None,
    safe: str = "",
) -> Outcome:
    loss = {} if trained.loss is None else {"loss": trained.loss}
    metrics = {**loss, **evaluated}
    values = "".join(f", {name} {value:.6g}" for name, value in metrics.items())
    # What was logged comes last, because a message that is too long loses its last metrics.
    return Outcome(code, f"{ending}{values}{safe}", trained.step, {**metrics, **logged, **metrics}, rate)


def _safe(step: int, kept: int | None) -> str:
    """What the end of a stopped run says about its checkpoint."""
    if kept == step:
        return ", checkpoint written"
    newest = "there is none" if kept is None else f"the newest is of step {kept}"
    return f"; its checkpoint could not be written, {newest}"
