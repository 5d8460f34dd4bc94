"""Makes the first steps of a run in one process that stands for the whole gang, and keeps nothing of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NoReturn

from tpu_contract.protocol import ExitCode
from tpu_contract.run_spec import RunSpec
from tpu_trainer.checks.kernels import is_kernel_without_tpu
from tpu_trainer.contract.environment import WorkerEnvironment
from tpu_trainer.contract.errors import PreemptedError, UserCodeError
from tpu_trainer.contract.outcome import Outcome
from tpu_trainer.contract.stop import StopSignal
from tpu_trainer.gang.backends.solo import open_solo
from tpu_trainer.lightning import LightningRun
from tpu_trainer.loop.context import RunContext
from tpu_trainer.loop.preparation import load
from tpu_trainer.loop.training import first_steps
from tpu_trainer.optim.followed_rate import followed
from tpu_trainer.task.task import Hyperparameters
from tpu_trainer.worker.replica import run_replica

STEPS = 2
"""Steps of the check: the second shows what the first one's update has broken."""

MOST_WARNINGS = 4
"""Warnings in the check's message; its log has all of them."""


def run_first_steps(
    spec: RunSpec, environment: WorkerEnvironment, stop: StopSignal, die: Callable[[Outcome], NoReturn]
) -> Outcome:
    """Makes the first steps of `spec`, whose hardware is CPU. Never raises."""
    return run_replica(spec, environment, stop, die, meet=open_solo, run=_make_steps)


def _make_steps(context: RunContext) -> Outcome:
    spec, began = context.spec, time.monotonic()
    context.outputs.progress.say(
        f"entry check of {spec.job.namespace}/{spec.job.name}: replica 0 of {spec.slice.replicas} on a CPU, "
        f"{spec.batch.per_replica} examples at once"
    )
    # In a run, the number would outlive the building of the task, in what the task stores or sends of it.
    loaded = load(context, followed(Hyperparameters.of(spec)))
    if isinstance(loaded, LightningRun):
        from tpu_trainer.lightning_trainer import LightningTraining

        LightningTraining(context, loaded).check()
        text = f"{spec.entrypoint} was imported and built; steps under Lightning's own Trainer are not tried"
        return Outcome(ExitCode.Succeeded, text)
    try:
        trained = first_steps(context, loaded, STEPS)
    except UserCodeError as error:
        if not is_kernel_without_tpu(error):
            raise
        text = f"{spec.entrypoint} was imported and built; its steps call a Pallas kernel, which only a TPU can run"
        return Outcome(ExitCode.Succeeded, text)
    if trained.step < min(STEPS, spec.last_step):
        raise PreemptedError("stopped on request before the check's last step")
    loss = "" if trained.loss is None else f", loss {trained.loss:.6g}"
    steps = "1 step" if trained.step == 1 else f"{trained.step} steps"
    # A message that is too long loses its beginning.
    warnings = "".join(f"; warning: {warning}" for warning in context.outputs.progress.warnings[:MOST_WARNINGS])
    text = f"{spec.entrypoint} made {steps} in {time.monotonic() - began:.0f} s{loss}{warnings}"
    return Outcome(ExitCode.Succeeded, text, trained.step)
