"""A run under the trainer's own loop, from the loaded task to its outcome: training, evaluations, and the result."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from tpu_contract.protocol import Phase, StartPhase
from tpu_trainer.checkpoint.checkpointer import Checkpoints, CheckpointSchedule
from tpu_trainer.checkpoint.snapshot import check_state, is_from_lightning
from tpu_trainer.contract.errors import PeerLostError, UserCodeError, user_code
from tpu_trainer.contract.findings import Finding
from tpu_trainer.contract.outcome import Outcome, finite
from tpu_trainer.data.batch_source import check_data, open_batches, open_data
from tpu_trainer.data.loading import evaluation_size
from tpu_trainer.data.order import Order
from tpu_trainer.doctor.last_weights import checksum_of
from tpu_trainer.gang.backends.base import move_model
from tpu_trainer.lightning.lightning_run import only_under_lightning
from tpu_trainer.loop.checkpoints import CheckpointStorage, describe_nothing_left
from tpu_trainer.loop.context import RunContext
from tpu_trainer.loop.ending import (
    keep_last,
    save_result,
    stopped_outcome,
    succeeded_outcome,
    warn_left_out,
    warn_unlearned,
    write_weights,
)
from tpu_trainer.loop.entrypoint import Loaded
from tpu_trainer.loop.evaluate import evaluate, try_evaluation
from tpu_trainer.loop.instruments import Instruments
from tpu_trainer.loop.loop import TrainingLoop, TrainingResult
from tpu_trainer.loop.preparation import prepare
from tpu_trainer.loop.trainable import PreparedTask
from tpu_trainer.optim.schedulers import Schedules
from tpu_trainer.reporting.throughput import NoiseMeter
from tpu_trainer.task.hooks import Hooks
from tpu_trainer.task.logbook import use_book
from tpu_trainer.task.task import Hyperparameters


def run_own_loop(context: RunContext, loaded: Loaded) -> Outcome:
    """Runs the loaded task to its outcome."""
    backend, spec, outputs = context.backend, context.spec, context.outputs
    hp, (task, hooks) = Hyperparameters.of(spec), loaded
    try:
        check_data(task, hp.seed, backend, context.environment.host_index, outputs.add_finding)
        context.start_times.enter(StartPhase.CHECKPOINT)
        storage = CheckpointStorage.of(spec, task.model, backend)
        checkpoint = storage.choose(backend, outputs)
        if checkpoint is not None and is_from_lightning(checkpoint.snapshot):
            raise only_under_lightning("the job's checkpoint was written under Lightning's own Trainer")
        context.start_times.enter(StartPhase.FIRST_STEP)
        writers = storage.writers(backend, context.environment, outputs)
        work, resumed = prepare(context, task, hooks, hp, storage, checkpoint), checkpoint is not None
        done = describe_nothing_left(work.start, checkpoint, work.hp)
        # As large as the model and its optimizer, and not needed any more.
        del checkpoint
        together = backend.reads_together
        checkpoints = storage.checkpoints(spec, work, outputs, writers, resumed, together=together)
        try:
            return _Training(context, work, _instruments(context, work, checkpoints)).run(done)
        except PeerLostError:
            if writers is not None:
                writers.peer_lost()
            raise
        finally:
            # A snapshot that was taken is worth writing, however the run ends.
            with context.clock.during(Phase.CHECKPOINT):
                checkpoints.finish()
            outputs.progress.checkpoint_step = checkpoints.last_step
    except BaseException as error:
        _call_failure_hooks(hooks, error)
        raise


def first_steps(context: RunContext, loaded: Loaded, count: int) -> TrainingResult:
    """Prepares the loaded task as a run does, evaluates one batch and makes at most `count` steps, as a run that is
    then asked to stop. Nothing is kept, and the task's `finish` is not called."""
    pace, stop, hp = context.pace, context.stop, Hyperparameters.of(context.spec)
    context = replace(context, stop=lambda: stop() or pace.last == count - 1)
    task, hooks = loaded
    check_data(task, hp.seed, context.backend, context.environment.host_index, context.outputs.add_finding)
    work = prepare(context, task, hooks, hp, CheckpointStorage(None), None)
    # What the replicas ask for is read whenever a checkpoint is due.
    checkpoints = Checkpoints(CheckpointSchedule(count, None, hp.last_step))
    context.begin(0)
    return _Training(context, work, _instruments(context, work, checkpoints)).train()


def _instruments(context: RunContext, work: PreparedTask, checkpoints: Checkpoints) -> Instruments:
    backend, batch = context.backend, work.hp.global_batch_size
    model = work.task.model
    return Instruments(
        context,
        model,
        work.hp,
        work.start,
        checkpoints,
        work.logbook,
        lambda: checksum_of(model, work.averaged, backend),
        closing=work.closing,
        noise=NoiseMeter(batch // work.hp.accumulation_steps // backend.terms, batch) if work.noise_scale else None,
        average=work.averaged,
    )


@dataclass(frozen=True)
class _Training:
    context: RunContext
    work: PreparedTask
    instruments: Instruments

    def run(self, done: str | None) -> Outcome:
        """Runs the training to its outcome. `done`: describes a run whose steps were all made before it began."""
        instruments, start = self.instruments, self.work.start
        self.context.begin(start.step)
        if done is not None:
            # The weights are those of the checkpoint that the run begins with.
            instruments.saved = start.step, instruments.weights()
        try:
            trained = self.train()
        except BaseException:
            instruments.leave()
            raise
        if trained.stopped:
            return stopped_outcome(trained.step, trained.loss, instruments)
        evaluated, is_best = self._last_evaluation(trained)
        self._fit_ends()
        warn_left_out(trained.step, evaluated, self.context.outputs)
        warn_unlearned(self.context.spec, trained.step, evaluated, instruments)
        # A rung of a ladder is not the result.
        if not self.work.on_lower_rung:
            save_result(trained.step, trained.position, instruments, again=is_best and trained.loss is None)
        with self.context.clock.during(Phase.CHECKPOINT):
            keep_last(trained.step, trained.position, instruments)
            if not self.work.on_lower_rung:
                write_weights(self.context, trained.step, self.work.task.model, self.work.averaged)
                self._finish()
        ending = trained.early or done or f"trained {trained.step} steps"
        return succeeded_outcome(ending, trained.step, trained.loss, evaluated, self.instruments)

    def train(self) -> TrainingResult:
        work, instruments, backend = self.work, self.instruments, self.context.backend
        with user_code("the start of the training"), work.group_changes.restored():
            work.hooks.step_made(work.start.step)
            work.schedules.fast_forward(work.optimizer, work.start.step, work.start.position.epoch)
            work.hooks.fit_begins(work.optimizer, work.start.step)
        if self.context.spec.checkpoint is not None:
            check_state(work.optimizer, work.hooks.state)
        # A resumed run has made the rehearsal before.
        if work.start.step == 0:
            with work.hooks.rehearsal():
                tried = try_evaluation(work.task, self._order.rows, self.context.share, backend)
            # A LightningModule can recognise a rehearsal by its Trainer, and log nothing in it.
            if tried:
                work.policy.check(tried)
        data = open_data(work.task, self._order, self.context.spec.dataset_size)
        passes = range(*(step * data.order.passes for step in (work.start.step, work.hp.last_step)))
        host, tell = self.context.environment.host_index, self.context.outputs.add_finding
        reading = open_batches(work.task, data, passes, backend, host, tell)
        if self.context.spec.checkpoint is not None:
            instruments.merge_positions = partial(data.merge, backend=backend)
        with backend.feed(reading, instruments.device_time) as batches, use_book(instruments.logbook):
            loop = TrainingLoop(work, backend, instruments, self.context.stop, self._evaluate_now)
            trained = loop.run(batches)
        if trained.stopped:
            self._fit_ends()
        else:
            instruments.finish_log(trained.step)
        return trained

    def _evaluate_now(self, step: int) -> bool:
        """Evaluates in the middle of the training. Returns whether the evaluation is the best so far."""
        work = self.work
        with self.context.clock.during(Phase.EVALUATE), self.instruments.doctor.set_aside():
            metrics, values = self._evaluate(step, work.schedules)
            return self._judge(step, values, metrics)

    def _last_evaluation(self, trained: TrainingResult) -> tuple[dict[str, float], bool]:
        """Evaluates after all hooks of the training's end. Returns the metrics, and whether they are the best so
        far."""
        policy, step = self.work.policy, trained.step
        judged = policy.evaluated == step
        # An evaluation has just ended the training, and no hook has changed the weights since.
        if judged and (self.work.on_lower_rung or self.instruments.evaluated == (step, self.instruments.weights())):
            return dict(policy.metrics), False
        if examples := evaluation_size(self.work.task):
            self.context.outputs.progress.say(f"evaluating on {examples} examples")
        with self.context.clock.during(Phase.EVALUATE):
            metrics, values = self._evaluate(step)
            if judged:
                # The first evaluation of this step has ended the training; the hooks changed the weights after it.
                self._note(step, values, metrics)
                return metrics, False
            return metrics, self._judge(step, values, metrics)

    def _fit_ends(self) -> None:
        with user_code("the end of the fit"):
            self.work.hooks.fit_ends()
        self.context.backend.sync()

    @property
    def _order(self) -> Order:
        """Returns the order of the examples. A pass of an evaluation has as many rows as one of the training: as many
        fit into memory here, too."""
        hp, share = self.work.hp, self.context.share
        return Order(hp.global_batch_size, hp.seed, share, hp.accumulation_steps, self.work.start.position)

    def _evaluate(self, step: int, schedules: Schedules | None = None) -> tuple[dict[str, float], dict[str, float]]:
        """Returns the metrics, and rank 0's values of those that the run follows. `schedules`: those that monitor a
        metric make a step; after the last step no rate is left to change."""
        work, backend = self.work, self.context.backend
        if evaluation_size(work.task):
            self.instruments.evaluated = step, self.instruments.weights()
        with (
            use_book(None),
            self.instruments.buffers.lent(),
            nullcontext() if work.average is None else work.average.in_model(),
        ):
            metrics = evaluate(work.task, self._order.rows, self.context.share, backend)
        self.context.outputs.add_evaluation(step, metrics)
        for text in work.hooks.remarks:
            self.context.outputs.add_finding(Finding("Evaluation", step, text))
        values = work.policy.agree(metrics, backend)
        if metrics:
            with user_code("the end of an evaluation"):
                work.hooks.evaluation_ends(step, {**metrics, **values})
                if schedules is not None:
                    schedules.evaluated({**metrics, **values})
            backend.sync()
        return metrics, values

    def _judge(self, step: int, values: Mapping[str, float], metrics: Mapping[str, float]) -> bool:
        """Applies the policy; returns whether the evaluation is the best so far. `values`: rank 0's, of the metrics
        that the run follows."""
        is_best = self.work.policy.judge(step, values, metrics)
        self._note(step, values, metrics)
        return is_best

    def _note(self, step: int, values: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        known = {name: finite(value) for name, value in {**metrics, **values}.items()}
        self.instruments.checkpoints.note_evaluation(step, known)

    def _finish(self) -> None:
        """Calls the task's `finish` in the reporting replica; the others wait.

        Raises:
            UserCodeError: in every replica, if it failed.
        """
        task, average = self.work.task, self.work.average
        if task.finish is None:
            return
        failure: UserCodeError | None = None
        finishes = self.context.outputs.is_reporter
        if finishes or self.context.backend.reads_together:
            try:
                with nullcontext() if average is None else average.in_model():
                    move_model(task.model, torch.device("cpu"))
                    if finishes:
                        with user_code("the task's finish"):
                            task.finish(task.model.eval())
            except UserCodeError as error:
                failure = error
        rows = self.context.backend.gather([float(failure is not None)])
        if failure is not None:
            raise failure
        if any(bad for (bad,) in rows):
            raise UserCodeError("the task's finish failed on worker 0, whose log says why")


def _call_failure_hooks(hooks: Hooks, error: BaseException) -> None:
    """Calls the hooks for failures. Prints what they raise, which would otherwise replace `error`."""
    try:
        hooks.failed(error)
    except Exception as raised:
        print(f"the task's hook for failures raised {type(raised).__name__}: {raised}", file=sys.stderr, flush=True)
