"""Prepares what is trained: the task, its model and optimizer on the device, and a checkpoint's state in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.optim import SGD

from tpu_contract.run_spec import NotFinitePolicy
from tpu_trainer.checkpoint.catalogue import LoadedCheckpoint
from tpu_trainer.checkpoint.commit import Author
from tpu_trainer.checkpoint.handover import fetch_hooks_state, give_average, give_model, give_optimizer
from tpu_trainer.checkpoint.initial import load_initial_weights
from tpu_trainer.checkpoint.resume import Start
from tpu_trainer.contract.errors import UserCodeError, user_code
from tpu_trainer.contract.findings import Finding
from tpu_trainer.data.epochs import shares_epochs
from tpu_trainer.data.loading import describe_resize, epochs_of, evaluation_size, held_out, size_difference
from tpu_trainer.doctor.last_weights import Closing
from tpu_trainer.gang.compiled import compile_loss, compile_update
from tpu_trainer.lightning import LightningRun
from tpu_trainer.loop.checkpoints import CheckpointStorage, report_origin
from tpu_trainer.loop.context import RunContext
from tpu_trainer.loop.entrypoint import Loaded, load_entrypoint
from tpu_trainer.loop.evaluation_policy import EvaluationPolicy, reduction_of
from tpu_trainer.loop.modes import enter_training_mode
from tpu_trainer.loop.trainable import ParameterGroupChanges, PreparedTask, refuse_lazy, refuse_synchronised_norm
from tpu_trainer.optim.adascale import FIELD, AdaScale
from tpu_trainer.optim.followed_rate import find_fixed_rates
from tpu_trainer.optim.optimizers import build_optimizer, find_unused_settings, refuse_closure
from tpu_trainer.optim.precision import apply_precision
from tpu_trainer.optim.schedule import LearningRateSetter
from tpu_trainer.optim.schedulers import build_schedulers
from tpu_trainer.optim.sharding import OptimizerSharding, refuse_indivisible
from tpu_trainer.optim.update import Average, count_on_device
from tpu_trainer.optim.without_compiler import spare_methods, spare_step
from tpu_trainer.task.hooks import Hooks
from tpu_trainer.task.horizon import find_differences
from tpu_trainer.task.logbook import Logbook
from tpu_trainer.task.task import Hyperparameters, Task

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_SHARES_EPOCHS = (
    "evaluation and train read from one dataset object that has set_epoch: evaluations see its examples as of the "
    "epoch that was read last, which read-ahead, workers and a restart change. Give evaluation an object of its own"
)


def split_for_noise_scale(context: RunContext) -> RunContext:
    """Returns the run with each step's batch in two passes, if the noise scale is asked for and a step would otherwise
    have one gradient only: it takes the gradients of two batch sizes."""
    batch, backend = context.spec.batch, context.backend
    rows = batch.total // backend.world
    if not context.spec.report.gradient_noise_scale or backend.terms * batch.accumulation > 1 or rows % 2:
        return context
    context.outputs.progress.say(
        f"for the gradient noise scale each step's batch is split into two passes of {rows // 2} examples; batch "
        "normalization sees only these"
    )
    halves = replace(batch, accumulation=2, per_replica=max(1, batch.per_replica // 2))
    return replace(context, spec=replace(context.spec, batch=halves))


def load(context: RunContext, hp: Hyperparameters) -> Loaded | LightningRun:
    """Calls the entrypoint with the run's seed: the same on every replica."""
    with context.seeded(hp.seed):
        loaded = load_entrypoint(context.spec.entrypoint, hp, context.spec.loop, context.share)
    if isinstance(loaded, LightningRun):
        if hp.ada_scale_batch_size is not None:
            raise UserCodeError(
                f"{FIELD}: AdaScale needs the trainer's own loop, which measures the gradients of the replicas, and "
                "Lightning's Trainer trains this module; use Linear or SquareRoot"
            )
        return loaded
    refuse_lazy(loaded.task.model)
    task = apply_precision(loaded.task, hp.precision, context.backend.device)
    if _compiles(context):
        task = replace(task, loss=compile_loss(task.loss, context.backend.device))
    return Loaded(task, loaded.hooks)


def prepare(
    context: RunContext,
    task: Task,
    hooks: Hooks,
    hp: Hyperparameters,
    storage: CheckpointStorage,
    checkpoint: LoadedCheckpoint | None,
) -> PreparedTask:
    """Puts model and optimizer on the device, with the checkpoint's state if there is one."""
    spec, backend, tell = context.spec, context.backend, context.outputs.add_finding
    _warn_of_data(context, task, hp)
    policy_state = storage.policy_state(checkpoint)
    start = storage.start(checkpoint, hp, spec)
    if start.gained is not None and start.gained.steps >= hp.train_steps:
        hp = replace(hp, last_step=start.step)
    begun_with = _place_model(context, task.model, checkpoint)
    if not _compiles(context):
        spare_methods()
    optimizer = build_optimizer(task, hp)
    if not _compiles(context):
        spare_step(optimizer)
    fixed = list(find_fixed_rates(optimizer))
    schedules = build_schedulers(task, hooks, optimizer, hp)
    refuse_closure(optimizer)
    sharding = _sharding(context, optimizer, task.model)
    if _compiles(context):
        _compile_update(context, optimizer, sharding)
    if skips := spec.on_not_finite is NotFinitePolicy.SKIP:
        count_on_device(optimizer, backend.device)

    def warn(text: str) -> None:
        tell(Finding("Logging", context.pace.last or 0, text))

    group_changes, logbook = ParameterGroupChanges(task.model, optimizer), Logbook(backend, warn)
    # Before the optimizer's state is restored: it takes the optimizer's present rates for the recipe's.
    rates = LearningRateSetter(
        optimizer,
        hp,
        start.ramp,
        reduction_of(policy_state, spec),
        own=bool(schedules.schedulers),
        tell=tell,
        say=context.outputs.progress.say,
    )
    policy, closing = EvaluationPolicy(spec, start, rates, schedules.monitors), Closing(start.ended)
    if evaluation_size(task) == 0:
        policy.check({})
    epochs = epochs_of(task, hp.train_steps, hp.global_batch_size)
    for text in (
        *fixed,
        *find_unused_settings(task, hooks, optimizer, hp),
        *find_differences(schedules.schedulers, hp.train_steps, epochs),
    ):
        tell(Finding("Recipe", start.step, text))
    work = PreparedTask(
        task,
        hooks,
        hp,
        optimizer,
        rates,
        schedules,
        group_changes,
        start,
        policy,
        logbook=logbook,
        closing=closing,
        on_lower_rung=spec.end_after_steps is not None,
        skips=skips,
        begun_with=begun_with,
        clip_norm=None if hooks.clips else hp.gradient_clip_norm,
        sharding=sharding,
    )
    if checkpoint is not None and storage.target is not None:
        work = _restore(context, work, checkpoint, policy_state, storage.target.author)
    average = _average(context, task.model, hp, checkpoint)
    gains = _gains(context, work.start, optimizer, hp)
    return replace(work, average=average, noise_scale=_has_noise_scale(context), gains=gains)


def _restore(
    context: RunContext,
    work: PreparedTask,
    checkpoint: LoadedCheckpoint,
    policy_state: Mapping[str, Any] | None,
    me: Author,
) -> PreparedTask:
    document = checkpoint.snapshot.document
    work.group_changes.load(document.get("growth"))
    work.logbook.load(document.get("logged"))
    give_optimizer(checkpoint, work.optimizer, context.backend, work.sharding)
    work.rates.load(document.get("rates"))
    work.schedules.load(document.get("plateau"))
    start = replace(work.start, ramp=work.rates.ramp)
    state = fetch_hooks_state(checkpoint, context.backend)
    with user_code("restoring the state of the task's hooks"):
        work.hooks.load(state)
    work.policy.load(policy_state)
    report_origin(start, checkpoint, me, work.hp, context.outputs)
    text = describe_resize(work.task.train, document.get("trainExamples"), start.position)
    if text is not None:
        context.outputs.add_finding(Finding("Data", start.step, text))
    return replace(work, start=start)


def _compiles(context: RunContext) -> bool:
    return context.spec.torch.execution == "Compile"


def _compile_update(context: RunContext, optimizer: Optimizer, sharding: OptimizerSharding | None) -> None:
    programs = "the loss, its gradients and the update"
    if sharding is not None or not compile_update(optimizer, context.backend.device):
        why = "recipe.sharding divides it" if sharding is not None else f"{type(optimizer).__name__} is not torch's own"
        programs = f"the loss and its gradients, but not the update: {why}"
    context.outputs.progress.say(f"torch.compile makes programs of {programs}; the first steps take longer")


def _warn_of_data(context: RunContext, task: Task, hp: Hyperparameters) -> None:
    tell = context.outputs.add_finding
    difference = size_difference(context.spec.dataset_size, task.train, hp.train_steps, hp.global_batch_size)
    if difference is not None:
        tell(Finding("DatasetSize", 0, difference))
    if task.evaluation is not None and evaluation_size(task) == 0:
        tell(Finding("Evaluation", 0, "the task's evaluation dataset is empty: the result will have no metrics"))
    if any(shares_epochs(task.train, dataset) for dataset in held_out(task).values()):
        tell(Finding("Evaluation", 0, _SHARES_EPOCHS))


def _place_model(context: RunContext, model: nn.Module, checkpoint: LoadedCheckpoint | None) -> str | None:
    """Puts the model on the device, and returns where its first weights came from; None if the task made them."""
    spec, backend = context.spec, context.backend
    begun_with = None
    if checkpoint is not None:
        give_model(checkpoint, model, backend)
        begun_with = checkpoint.snapshot.document.get("begunWith")
    else:
        if spec.checkpoint is not None and spec.checkpoint.init_from is not None:
            begun_with = _begin_with(context, model)
        backend.place(model)
    if (line := enter_training_mode(model)) is not None:
        context.outputs.progress.say(line)
    refuse_synchronised_norm(model, spec.backend, backend.device)
    return begun_with


def _begin_with(context: RunContext, model: nn.Module) -> str | None:
    """Loads the initial weights in rank 0, which passes them to all others, and in the replica that reports. Returns
    where they come from."""
    outputs, checkpoint = context.outputs, context.spec.checkpoint
    if context.backend.rank != 0 and not outputs.is_reporter:
        return None
    assert checkpoint is not None
    assert checkpoint.init_from is not None
    source, difference = load_initial_weights(checkpoint.init_from, model)
    outputs.progress.say(f"begins at step 0 with {source}")
    if difference is not None:
        outputs.add_finding(Finding("Checkpoint", 0, f"checkpoint.initFrom: {difference}"))
    return source


def _sharding(context: RunContext, optimizer: Optimizer, model: nn.Module) -> OptimizerSharding | None:
    """Returns how the optimizer's state is divided among the replicas; None if each has all of it.

    Raises:
        UserCodeError: the recipe divides the state, and this run cannot.
    """
    if context.spec.sharding == "Replicated":
        return None
    if context.spec.backend == "xla-spmd":
        raise UserCodeError(
            "recipe.sharding: Optimizer needs a process per replica, and backend XLASPMD runs one per host; use "
            "backend XLA or Torch"
        )
    # Also with one replica, because recipes are tried on the smallest slice first.
    refuse_indivisible(optimizer, context.backend)
    return OptimizerSharding(optimizer, model, context.backend) if context.backend.world > 1 else None


def _average(
    context: RunContext, model: nn.Module, hp: Hyperparameters, checkpoint: LoadedCheckpoint | None
) -> Average | None:
    """Returns the average of the weights, from the checkpoint if it has one; None if the recipe has none."""
    if hp.ema_decay is None:
        return None
    say = context.outputs.progress.say
    average = Average(model, hp.ema_decay, context.backend)
    say(f"evaluates the average of the weights, with a decay of {hp.ema_decay:g} per step")
    if checkpoint is not None and not checkpoint.snapshot.tensors["ema"]:
        say("the checkpoint has no average of the weights: it starts with the checkpoint's weights")
    elif checkpoint is not None:
        give_average(checkpoint, average, context.backend)
    return average


def _has_noise_scale(context: RunContext) -> bool:
    if not context.spec.report.gradient_noise_scale:
        return False
    if context.backend.terms * context.spec.batch.accumulation > 1:
        return True
    context.outputs.progress.say(
        "no gradient noise scale: it compares the gradients of several processes or accumulated passes, and this run "
        "has one of a step's gradients"
    )
    return False


def _gains(context: RunContext, start: Start, optimizer: Optimizer, hp: Hyperparameters) -> AdaScale | None:
    """Returns what sets the rates with AdaScale; None without it.

    Raises:
        UserCodeError: the optimizer is not SGD, whose steps the gain is derived for.
    """
    if start.gained is None:
        return None
    if not isinstance(optimizer, SGD):
        raise UserCodeError(
            f"{FIELD}: AdaScale is derived for SGD, and the task built {type(optimizer).__name__}; build "
            "torch.optim.SGD, or use Linear or SquareRoot"
        )
    skips = context.spec.on_not_finite is NotFinitePolicy.SKIP
    return AdaScale(start.gained, start.step, hp, context.backend, skips=skips)
