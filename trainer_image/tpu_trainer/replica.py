"""One replica's run from backend to outcome. Called in the host's own process, or in one process per chip."""

from __future__ import annotations

import random
import threading
from itertools import islice

import numpy as np
import torch

from tpu_trainer.backends import open_backend
from tpu_trainer.backends.base import Backend
from tpu_trainer.contract import ExitCode
from tpu_trainer.data import Share, train_batches
from tpu_trainer.entrypoint import load_task
from tpu_trainer.environment import WorkerEnvironment
from tpu_trainer.evaluate import evaluate
from tpu_trainer.evaluation_plan import evaluation_batches, evaluation_plan, evaluation_size
from tpu_trainer.loop import train
from tpu_trainer.optimizers import build_optimizer
from tpu_trainer.outcome import Outcome, outcome_of
from tpu_trainer.progress import Progress
from tpu_trainer.spec import RunSpec
from tpu_trainer.stop import StopFlag
from tpu_trainer.task import Hyperparameters, Task

# On v2 and v3 two replicas are threads of one process and share its generators: they take turns, or neither would
# get the weights that belong to the seed.
_GENERATORS = threading.Lock()


def run_replica(spec: RunSpec, environment: WorkerEnvironment, stop: StopFlag) -> Outcome:
    """Trains and evaluates; every failure becomes an outcome, never an exception."""
    progress = Progress(spec.train_steps, None, silent=True)
    try:
        backend = open_backend(spec, environment, stop)
        # By host and place on the host, not by rank: on TPU the numbering of chips is independent of the
        # hosts'.
        reports = environment.host_index == 0 and backend.local_rank == 0
        progress = Progress(spec.train_steps, environment.progress_file, silent=not reports)
        outcome = _run(spec, backend, progress, stop)
        # The first to leave would cut the connection of those still in the last collective.
        backend.barrier()
        backend.close()
    except Exception as error:
        return outcome_of(error, progress.step)
    return outcome


def _run(spec: RunSpec, backend: Backend, progress: Progress, stop: StopFlag) -> Outcome:
    hp = Hyperparameters.of(spec)
    progress.starting(_greeting(spec, backend))
    task = _start(spec.entrypoint, hp, backend)
    backend.place(task.model)
    optimizer = build_optimizer(task, hp)
    share = Share(backend.rank, backend.world)

    def evaluate_now(step: int) -> None:
        progress.evaluated(step, _evaluate(task, hp, backend, share))

    passes = hp.accumulation_steps
    examples = train_batches(task, hp.global_batch_size, hp.seed, share, passes)
    with backend.feed(islice(examples, hp.train_steps * passes)) as batches:
        trained = train(task, hp, optimizer, batches, backend, progress, stop, evaluate_now)
    if trained.stopped:
        metrics, code, ending = {"loss": trained.loss}, ExitCode.Preempted, "stopped on request after"
    else:
        progress.evaluating(evaluation_size(task))
        evaluated = _evaluate(task, hp, backend, share)
        progress.evaluated(trained.step, evaluated)
        metrics, code, ending = {"loss": trained.loss, **evaluated}, ExitCode.Succeeded, "trained"
    values = "".join(f", {name} {value:.6g}" for name, value in metrics.items())
    line = f"{ending} {trained.step} steps{values}"
    if not trained.stopped:
        progress.done()
    return Outcome(code, line, trained.step, metrics, trained.examples_per_second)


def _start(entrypoint: str, hp: Hyperparameters, backend: Backend) -> Task:
    """The task, drawn from the run's seed; what is drawn after it, dropout masks above all, differs per replica."""
    with _GENERATORS:
        _seed(backend, hp.seed)
        task = load_task(entrypoint, hp)
        _seed(backend, hp.seed + backend.rank)
    return task


def _evaluate(task: Task, hp: Hyperparameters, backend: Backend, share: Share) -> dict[str, float]:
    size = evaluation_size(task)
    if task.metrics is None or size == 0:
        return {}
    # As many rows at once as a training pass has: what fits there fits here.
    plan = evaluation_plan(size, hp.global_batch_size // share.world // hp.accumulation_steps, share)
    return evaluate(task, task.metrics, evaluation_batches(task, plan), backend)


def _seed(backend: Backend, seed: int) -> None:
    """Every generator user code may draw from. numpy's global one takes 32 bits."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    backend.seed(seed)


def _greeting(spec: RunSpec, backend: Backend) -> str:
    return (
        f"{spec.job.namespace}/{spec.job.name} attempt {spec.job.attempt}, {spec.backend} on {spec.hardware}: "
        f"replicas {spec.slice.replicas}, hosts {spec.slice.hosts}, processes {backend.world}; "
        f"global batch {spec.batch.total}, steps {spec.train_steps}"
    )
