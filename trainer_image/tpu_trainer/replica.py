"""One replica's run, from its backend to its outcome: in the host's own process, or in one process per device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn

from tpu_trainer.backends import open_backend
from tpu_trainer.backends.base import Backend, move_model
from tpu_trainer.board import Board, open_board
from tpu_trainer.checkpoint.catalogue import Found
from tpu_trainer.checkpoint.checkpointer import Checkpoints
from tpu_trainer.checkpoint.handover import give_average, give_model, give_optimizer, hooks_of
from tpu_trainer.checkpoint.initial import begin_with
from tpu_trainer.checkpoint.snapshot import is_lightnings, weights_of
from tpu_trainer.clock import Clock, Phase, process_seconds
from tpu_trainer.data import GENERATORS, Order, Share, evaluation_size, seed_generators, size_difference
from tpu_trainer.doctor.doctor import Doctor
from tpu_trainer.doctor.findings import Finding
from tpu_trainer.doctor.hang import Pace, watchdog
from tpu_trainer.ending import keep_last, stopped, succeeded, tell_cost, tell_not_finite
from tpu_trainer.entrypoint import Loaded, load_task
from tpu_trainer.environment import WorkerEnvironment
from tpu_trainer.errors import PeerLostError, PreemptedError, UserCodeError, user_code
from tpu_trainer.evaluate import evaluate, try_evaluation
from tpu_trainer.hooks import Hooks
from tpu_trainer.instruments import Instruments
from tpu_trainer.lightning import NeedsTrainerError
from tpu_trainer.logbook import Logbook, closed
from tpu_trainer.loop import train
from tpu_trainer.optimizers import build_optimizer, refuse_closure, unused
from tpu_trainer.outcome import Outcome, finite, outcome_of
from tpu_trainer.precision import in_precision
from tpu_trainer.progress import Progress
from tpu_trainer.reading import Reading, check_data, open_reading
from tpu_trainer.reporting.heartbeat import open_heartbeat
from tpu_trainer.reporting.report import present_report
from tpu_trainer.schedule import LearningRate
from tpu_trainer.sharding import Sharding, refuse_whole_parameters
from tpu_trainer.spec import InitSpec, OnNotFinite, RunSpec
from tpu_trainer.steering import Steering
from tpu_trainer.stop import SharedStop, StopFlag, StopSignal
from tpu_trainer.storage import Storage, nothing_left, start_of, tell_origin
from tpu_trainer.task import Hyperparameters, Task
from tpu_trainer.telemetry.rates import NoiseScale, Throughput, Utilisation
from tpu_trainer.telemetry.reporter import open_reporter
from tpu_trainer.telling import Telling
from tpu_trainer.trainable import Growth, Work, enter_training_mode, refuse_lazy, refuse_synchronised_norm
from tpu_trainer.update import Average, count_on_device

if TYPE_CHECKING:
    from torch.optim import Optimizer


def run_replica(
    spec: RunSpec, environment: WorkerEnvironment, stop: StopSignal | SharedStop, die: Callable[[Outcome], NoReturn]
) -> Outcome:
    """Trains and evaluates; every failure becomes an outcome, never an exception.

    `die` ends the process with an outcome when the run hangs, so that this call cannot return.
    """
    clock, pace = Clock(before=process_seconds() or 0.0), Pace()
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
            outcome = outcome_of(error, telling.progress.step if pace.last is None else pace.last)
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
        backend, spec = self.backend, self.spec
        self.telling.progress.starting(
            f"{spec.job.namespace}/{spec.job.name} attempt {spec.job.attempt}, {spec.backend} on {spec.hardware}: "
            f"replicas {spec.slice.replicas}, hosts {spec.slice.hosts}, processes {backend.world}; "
            f"global batch {spec.batch.total}, steps {spec.train_steps}"
        )
        try:
            return self._in_own_loop()
        except NeedsTrainerError as found:
            why = found.why
        # Imported once needed: few runs are under Lightning's Trainer.
        from tpu_trainer.lightning_trainer import OwnTrainer

        parts = (self.environment, self.stop, backend, self.clock, self.pace, self.telling)
        return OwnTrainer(spec, *parts).whole(why)

    def _in_own_loop(self) -> Outcome:
        """Raises NeedsTrainerError, in all replicas alike, before the first step."""
        backend, spec, hp = self.backend, self.spec, Hyperparameters.of(self.spec)
        share = Share(backend.rank, backend.world, backend.local_rank)
        task, hooks = self._load(hp, share)
        try:
            check_data(task, hp.seed, backend, self.environment.host_index, self.telling.finding)
            storage = Storage.of(spec, task.model, backend)
            found = storage.choose(backend, self.telling)
            if found is not None and is_lightnings(found.snapshot):
                raise NeedsTrainerError("the job's checkpoint was written under it")
            writers = storage.writers(backend, self.environment, self.telling)
            work, resumed = self._prepare(task, hooks, hp, storage, found), found is not None
            done = nothing_left(work.start, found, hp)
            # As large as the model and its optimizer, and not needed any more.
            del found
            checkpoints = storage.checkpoints(spec, work, self.telling, writers, resumed)
            try:
                return self._train(work, self._instruments(work, checkpoints), share, done)
            except PeerLostError:
                if writers is not None:
                    writers.peer_lost()
                raise
            finally:
                # However the run ends, a snapshot that was taken is worth writing.
                with self.clock.during(Phase.CHECKPOINT):
                    checkpoints.finish()
                self.telling.progress.committed(checkpoints.last_step)
        except NeedsTrainerError:
            raise
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
        return Loaded(in_precision(loaded.task, hp.precision, self.backend.device), loaded.hooks)

    def _prepare(self, task: Task, hooks: Hooks, hp: Hyperparameters, storage: Storage, found: Found | None) -> Work:
        """Model and optimizer on the device, with the checkpoint's state if there is one."""
        tell, say = self.telling.finding, self.telling.progress.say
        difference = size_difference(self.spec.dataset_size, task.train, hp.train_steps, hp.global_batch_size)
        if difference is not None:
            tell(Finding("DatasetSize", 0, difference))
        if task.evaluation is not None and evaluation_size(task) == 0:
            tell(Finding("Evaluation", 0, "the task's evaluation dataset is empty: the result will have no metrics"))
        steered = storage.steering_of(found)
        start = start_of(found, hp, self.spec, steered)
        begun_with = None
        if found is not None:
            give_model(found, task.model, self.backend)
            begun_with = found.snapshot.document.get("begunWith")
        else:
            if self.spec.checkpoint is not None and self.spec.checkpoint.init_from is not None:
                begun_with = self._begin_with(self.spec.checkpoint.init_from, task.model)
            self.backend.place(task.model)
        if (line := enter_training_mode(task.model)) is not None:
            say(line)
        refuse_synchronised_norm(task.model, self.spec.backend, self.backend.device)
        optimizer = build_optimizer(task, hp)
        if not hooks.gives_closure:
            refuse_closure(optimizer)
        sharding = self._sharding(optimizer)
        if skips := self.spec.on_not_finite is OnNotFinite.SKIP:
            count_on_device(optimizer, self.backend.device)

        def warn(text: str) -> None:
            tell(Finding("Logging", self.pace.last or 0, text))

        growth, logbook = Growth(task.model, optimizer), Logbook(self.backend, warn)
        # Before the optimizer's state is restored: it takes the optimizer's present rates for the recipe's.
        rates = LearningRate(optimizer, hp, start.ramp, own=hooks.own_schedule, tell=tell)
        steering = Steering(self.spec, start, rates, hooks.monitors)
        if evaluation_size(task) == 0:
            steering.check({})
        for text in unused(task, hooks, optimizer, hp):
            tell(Finding("Recipe", start.step, text))
        if found is not None and storage.target is not None:
            growth.load(found.snapshot.document.get("growth"))
            logbook.load(found.snapshot.document.get("logged"))
            give_optimizer(found, optimizer, self.backend, sharding)
            rates.load(found.snapshot.document.get("rates"))
            start = replace(start, ramp=rates.ramp)
            state = hooks_of(found, self.backend)
            with user_code("restoring the state of the task's hooks"):
                hooks.load(state)
            steering.load(steered)
            tell_origin(start, found, storage.target.author, hp, self.telling)
        average = None
        if hp.ema_decay is not None:
            average = Average(task.model, hp.ema_decay, self.backend)
            say(f"evaluates the average of the weights, with a decay of {hp.ema_decay:g} per step")
            if found is not None and not found.snapshot.tensors["ema"]:
                say("the checkpoint has no average of the weights: it starts with the checkpoint's weights")
            elif found is not None:
                give_average(found, average, self.backend)
        noise_scale = self.spec.report.gradient_noise_scale
        if noise_scale and self.backend.terms == 1:
            say("no gradient noise scale: it compares the gradients of several processes, and this run has one")
            noise_scale = False
        clip_norm = None if hooks.clips else hp.gradient_clip_norm
        return Work(
            task,
            hooks,
            hp,
            optimizer,
            rates,
            growth,
            start,
            steering,
            logbook=logbook,
            noise_scale=noise_scale,
            skips=skips,
            average=average,
            begun_with=begun_with,
            clip_norm=clip_norm,
            sharding=sharding,
        )

    def _sharding(self, optimizer: Optimizer) -> Sharding | None:
        """How the optimizer's state is divided among the replicas; None if each has all of it.

        Raises:
            UserCodeError: it was asked for and cannot be.
        """
        if self.spec.sharding == "None":
            return None
        if self.spec.backend == "xla-spmd":
            raise UserCodeError(
                "recipe.sharding: Optimizer needs a process per replica, and backend XLASPMD runs one per host; use "
                "backend XLA or Torch"
            )
        # Also on the smallest slice, where recipes are tried first.
        refuse_whole_parameters(optimizer, self.backend)
        return Sharding(optimizer, self.backend) if self.backend.world > 1 else None

    def _begin_with(self, spec: InitSpec, model: nn.Module) -> str | None:
        """Where the weights come from. Rank 0 reads them, since all others get its weights; so does the replica that
        reports, to tell of them."""
        if self.backend.rank != 0 and not self.telling.aloud:
            return None
        source, difference = begin_with(spec, model)
        self.telling.progress.say(f"begins at step 0 with {source}")
        if difference is not None:
            self.telling.finding(Finding("Checkpoint", 0, f"checkpoint.initFrom: {difference}"))
        return source

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
            backend=backend,
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

        def evaluate_now(step: int) -> bool:
            with self.clock.during(Phase.EVALUATE), instruments.doctor.set_aside():
                metrics, values = self._evaluate(work, step, share)
                return self._judge(work, step, values, metrics, checkpoints)

        try:
            with user_code("the start of the training"), work.growth.restored():
                work.hooks.fit_begins(work.optimizer, work.start.step)
            # A resumed run has done it before.
            if work.start.step == 0:
                with work.hooks.rehearsal():
                    tried = try_evaluation(work.task, _evaluation_rows(work, share), share, self.backend)
                # A LightningModule may log nothing in a rehearsal, which it can tell by its Trainer.
                if tried:
                    work.steering.check(tried)
            reading = self._reading(work, share)
            if self.spec.checkpoint is not None:
                instruments.whole = reading.whole
            with self.backend.feed(reading.batches) as batches, instruments.logbook.open():
                try:
                    trained = train(work, batches, self.backend, instruments, self.stop, evaluate_now)
                except NeedsTrainerError as needs:
                    # The other replicas may not have come to it.
                    raise needs.in_training() from None
            if not trained.stopped:
                instruments.finish_log(trained.step)
        except NeedsTrainerError:
            raise
        except BaseException:
            instruments.leave()
            raise
        rate, finiteness = instruments.throughput.rate, instruments.doctor.finiteness
        if trained.stopped:
            progress.stopped(checkpoints.last_step)
            return stopped(trained.step, trained.loss, checkpoints, progress, rate, finiteness.summary)
        evaluated = dict(work.steering.metrics)
        # Unless an evaluation has just ended the training.
        if work.steering.evaluated != trained.step:
            progress.evaluating(evaluation_size(work.task))
            with self.clock.during(Phase.EVALUATE):
                evaluated, values = self._evaluate(work, trained.step, share)
                is_best = self._judge(work, trained.step, values, evaluated, checkpoints)
            # Otherwise the checkpoint that this run wrote after its last step has the evaluation by now.
            if is_best and trained.loss is None:
                instruments.save(trained.step, trained.position, now=False)
        tell_not_finite(trained.step, evaluated, self.telling)
        with self.clock.during(Phase.CHECKPOINT):
            keep_last(trained.step, trained.position, instruments)
            self._leave_weights(work)
            self._finish(work)
        tell_cost(checkpoints, progress)
        progress.done(checkpoints.last_step)
        ending = trained.early or done or f"trained {trained.step} steps"
        return succeeded(ending, trained.step, trained.loss, evaluated, progress, rate, finiteness.summary)

    def _leave_weights(self, work: Work) -> None:
        """On the user's machine, a run without checkpoints leaves its weights beside its report."""
        directory = self.environment.report_directory
        if directory is None or self.spec.checkpoint is not None or not self.telling.aloud:
            return
        try:
            average = work.average.tensors if work.average else None
            for name, content in weights_of(work.task.model, average):
                (directory / name).write_bytes(content)
        except (OSError, UserCodeError) as error:
            self.telling.progress.say(f"the weights were not kept: {error}")

    def _reading(self, work: Work, share: Share) -> Reading:
        hp, start, telling = work.hp, work.start, self.telling
        order = Order(hp.global_batch_size, hp.seed, share, hp.accumulation_steps, start.position)
        passes = range(start.step * hp.accumulation_steps, hp.train_steps * hp.accumulation_steps)
        host, epoch_size = self.environment.host_index, self.spec.dataset_size
        say, tell = telling.progress.say, telling.finding
        return open_reading(work.task, order, passes, epoch_size, self.backend, host, tell, say)

    def _judge(
        self,
        work: Work,
        step: int,
        values: Mapping[str, float],
        metrics: Mapping[str, float],
        checkpoints: Checkpoints,
    ) -> bool:
        """Whether the evaluation is the best so far. `values`: rank 0's, of the metrics that the run follows."""
        rate = work.rates.reduction
        is_best = work.steering.judge(step, values, metrics)
        if work.rates.reduction != rate and not work.hooks.own_schedule:
            share = f"{work.rates.reduction:.6g} times the recipe's"
            self.telling.progress.say(f"step {step}: a plateau: from here on the learning rate is {share}")
        checkpoints.evaluated(step, {name: finite(value) for name, value in {**metrics, **values}.items()})
        return is_best

    def _evaluate(self, work: Work, step: int, share: Share) -> tuple[dict[str, float], dict[str, float]]:
        """The metrics, and rank 0's values of those that the run follows."""
        with closed(), nullcontext() if work.average is None else work.average.in_model():
            metrics = evaluate(work.task, _evaluation_rows(work, share), share, self.backend)
        self.telling.evaluated(step, metrics)
        values = work.steering.agreed(metrics, self.backend)
        if metrics:
            with user_code("the end of an evaluation"):
                work.hooks.evaluation_ends(step, {**metrics, **values})
            self.backend.sync()
        return metrics, values

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
