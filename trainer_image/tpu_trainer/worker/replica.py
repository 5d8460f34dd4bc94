"""Runs one replica, from its backend to its outcome, in the host's process or in one per device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NoReturn

from tpu_contract.protocol import Phase, StartPhase
from tpu_contract.run_spec import RunSpec
from tpu_trainer.contract.clock import Clock, StartTimes, StepPace, process_seconds
from tpu_trainer.contract.environment import WorkerEnvironment
from tpu_trainer.contract.errors import PeerLostError
from tpu_trainer.contract.outcome import Outcome, outcome_of
from tpu_trainer.contract.stop import SharedStop, StopFlag, StopSignal
from tpu_trainer.doctor.hang import watchdog
from tpu_trainer.gang.backends import Backend, open_backend
from tpu_trainer.lightning import LightningRun
from tpu_trainer.loop.context import RunContext
from tpu_trainer.loop.preparation import load, split_for_noise_scale
from tpu_trainer.loop.training import run_own_loop
from tpu_trainer.reporting.heartbeat import open_heartbeat
from tpu_trainer.reporting.loss_trend import LossTrend
from tpu_trainer.reporting.progress import ProgressLog
from tpu_trainer.reporting.report import present_report
from tpu_trainer.reporting.reporter import open_reporter
from tpu_trainer.reporting.run_outputs import RunOutputs
from tpu_trainer.reporting.rung import RungNumbers
from tpu_trainer.task.board import Board, open_board
from tpu_trainer.task.task import Hyperparameters

ReplicaRun = Callable[[RunContext], Outcome]
"""What a replica does once the gang has met."""


def run_replica(
    spec: RunSpec,
    environment: WorkerEnvironment,
    stop: StopSignal | SharedStop,
    die: Callable[[Outcome], NoReturn],
    *,
    meet: Callable[[RunSpec, WorkerEnvironment, StopFlag], Backend] | None = None,
    run: ReplicaRun | None = None,
) -> Outcome:
    """Trains and evaluates; every failure becomes an outcome, never an exception.

    `die` ends the process with an outcome when the run hangs, since this call cannot return then. `meet` opens the
    backend, by default `open_backend`; `run` is what the replicas do then, by default the training.
    """
    before = process_seconds(environment.host_process or "self") or 0.0
    clock, pace, start_times = Clock(before=before), StepPace(), StartTimes(before=before)
    # By host and place on the host, not by rank: TPU chips are numbered independently of the hosts.
    is_reporter = environment.host_index == 0 and environment.local_rank == 0
    progress = ProgressLog(spec.last_step, silent=not is_reporter)
    heartbeat = open_heartbeat(
        environment.progress_service if is_reporter else None,
        lambda: present_report(spec, clock, pace, progress, start_times, environment.packages_sha256),
    )
    # Replaced below: a report names the device.
    is_lower_rung = spec.end_after_steps is not None
    rung = RungNumbers(measures_noise=is_lower_rung) if is_lower_rung or spec.judge_after_steps else None
    reporter, losses = open_reporter(spec, None, clock, "", reports=False), LossTrend(spec.warmup_steps)
    outputs = RunOutputs(progress, reporter, heartbeat, is_reporter, losses, rung)

    def end_now(outcome: Outcome) -> NoReturn:
        outputs.end(outcome)
        die(outcome)

    with watchdog(clock, pace, end_now, stop.arrived, environment.hang_seconds):
        try:
            if meet is None:
                backend = open_backend(spec, environment, stop, partial(start_times.enter, StartPhase.MEETING))
            else:
                backend = meet(spec, environment, stop)
            start_times.enter(StartPhase.TASK)
            if isinstance(stop, StopSignal):
                # Installed again, because the device's runtime may have replaced the handler.
                stop.install()
            reporter = open_reporter(
                spec, environment.report_directory, clock, str(backend.device), reports=is_reporter
            )
            outputs = replace(outputs, reporter=reporter)
            with open_board(_board(outputs, pace, backend)):
                context = RunContext(spec, environment, stop, backend, clock, pace, outputs, end_now, start_times)
                outcome = (run or train)(context)
            # All leave together: the first to leave would cut off those still in the last collective, or waiting for
            # the last checkpoint. If one of them is lost, this replica's part is done.
            with clock.during(Phase.CHECKPOINT), suppress(PeerLostError):
                backend.barrier()
                backend.close()
        except Exception as error:
            outcome = outcome_of(error, outputs.progress.step if pace.last is None else pace.last)
        outcome = replace(outcome, checkpoint_step=progress.checkpoint_step)
        outputs.end(outcome)
    return outcome


def train(context: RunContext) -> Outcome:
    """Trains in the trainer's own loop, or under Lightning's Trainer if the job or the entrypoint says so."""
    spec = context.spec
    steps = spec.train_steps if spec.end_after_steps is None else f"{spec.last_step} of {spec.train_steps}"
    context.outputs.progress.say(
        f"{spec.job.namespace}/{spec.job.name} attempt {spec.job.attempt}, {spec.backend} on {spec.hardware}: "
        f"replicas {spec.slice.replicas}, hosts {spec.slice.hosts}, processes {context.backend.world}; "
        f"global batch {spec.batch.total}, steps {steps}"
    )
    context = split_for_noise_scale(context)
    loaded = load(context, Hyperparameters.of(context.spec))
    if not isinstance(loaded, LightningRun):
        return run_own_loop(context, loaded)
    # Imported only here, because few runs need Lightning's Trainer.
    from tpu_trainer.lightning_trainer import LightningTraining

    return LightningTraining(context, loaded).run()


def _board(outputs: RunOutputs, pace: StepPace, backend: Backend) -> Board:
    """Builds what the task's writers write to."""
    return Board(
        writes=outputs.is_reporter,
        last_step=lambda: pace.last or 0,
        add_curves=outputs.add_curves,
        add_summary=outputs.reporter.summary,
        missing=outputs.reporter.without_events,
        say=outputs.progress.say,
        together=backend.reads_together,
    )
