"""What a user's entrypoint gets and returns: the whole interface between user code and trainer.

Every process calls the entrypoint `module:callable` after seeding the random generators with the run's seed. It returns
a Task, a LightningModule, or a pair (LightningModule, LightningDataModule).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tpu_contract.run_spec import RunSpec, ScheduleSpec
from tpu_trainer.task.hooks import OFFERED, Hooks

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from tpu_trainer.gang.backends.base import Backend

Batch = Any
"""What `collate` returns: tensors, or nested lists, tuples and dicts of them. Every tensor goes to the device."""

Metrics = Callable[[nn.Module, Batch], Mapping[str, Tensor]]
"""(model, batch) -> by name, one value per example, shape [b]. Called in evaluation mode and without gradients."""

Collate = Callable[[list[Any]], Batch]
"""A list of examples, as the dataset returns them -> a batch, on the CPU."""

Orders = Callable[[int, int, int], Sequence[int]]
"""(epoch, seed, size of the dataset) -> the indices of the epoch's examples, in order; a list, an array or a tensor."""

Scheduler = Callable[["Optimizer", "Hyperparameters"], Any]
"""(optimizer, hyperparameters) -> an object with `step()`, as in torch.optim.lr_scheduler."""

_INTERVALS = ("step", "epoch")
_ALMOST = 0.92
"""How alike two names are that differ in a letter or two (epoch_end, epoch_ends), as difflib measures it."""


@dataclass(frozen=True)
class Hyperparameters:
    """The recipe as it is scaled to this slice. What the recipe leaves out has the named optimizer's own default.

    optimizer: its name, as in the recipe.
    learning_rate: the rate after warm-up. The loop applies warm-up and schedule to every parameter group.
    momentum: 0 if the recipe leaves it out.
    weight_decay: 0 if the recipe leaves it out, 0.01 with adamw.
    beta1: 0.9 if the recipe leaves it out.
    beta2: 0.999 if the recipe leaves it out, 0.99 with lion and rmsprop, whose alpha it is.
    epsilon: 1e-8 if the recipe leaves it out.
    global_batch_size: examples per step of the whole job.
    per_replica_batch_size: examples per pass on one replica.
    ada_scale_batch_size: the batch of the recipe, by which AdaScale scales the rate; None without AdaScale. With it,
        train_steps and warmup_steps are the recipe's, and the run ends once the gains add up to train_steps.
    accumulation_steps: passes per step.
    train_steps: steps of the whole training, by which the schedule goes.
    last_step: the step after which this run is done; before train_steps only in a rung of a ladder.
    warmup_steps: how many of them warm up.
    schedule: the learning rate after warm-up.
    evaluate_every_steps: None if the run is evaluated at its end only.
    ema_decay: the trainer averages the weights with it; None if it does not.
    gradient_clip_norm: the trainer clips the gradients to this length; None if it does not.
    precision: what the model computes in: "Float32", "BFloat16Mixed" or "BFloat16".
    seed: the run's seed. The entrypoint is called with all random generators seeded already.
    data_uri: the job's `data.uri`; None if it has none.
    parameters: the recipe's own parameters, as texts.
    silent: the fields that the recipe leaves out. An entrypoint's parameter of that name keeps its default.
    """

    optimizer: str
    learning_rate: float
    momentum: float
    weight_decay: float
    beta1: float
    beta2: float
    epsilon: float
    global_batch_size: int
    per_replica_batch_size: int
    accumulation_steps: int
    train_steps: int
    last_step: int
    warmup_steps: int
    schedule: ScheduleSpec
    evaluate_every_steps: int | None
    ema_decay: float | None
    gradient_clip_norm: float | None
    precision: str
    seed: int
    data_uri: str | None
    parameters: Mapping[str, str]
    silent: frozenset[str] = frozenset()
    ada_scale_batch_size: int | None = None

    @staticmethod
    def of(spec: RunSpec) -> Hyperparameters:
        recipe = spec.optimizer
        optional = {
            "momentum": recipe.momentum,
            "weight_decay": recipe.weight_decay,
            "beta1": recipe.beta1,
            "beta2": recipe.beta2,
            "epsilon": recipe.epsilon,
            "evaluate_every_steps": spec.evaluate_every_steps,
            "ema_decay": spec.ema_decay,
            "gradient_clip_norm": spec.gradient_clip_norm,
            "precision": None if spec.precision == "Float32" else spec.precision,
            "data_uri": spec.data_uri,
        }

        def either(value: float | None, otherwise: float) -> float:
            return otherwise if value is None else value

        return Hyperparameters(
            optimizer=recipe.name,
            learning_rate=recipe.learning_rate,
            momentum=either(recipe.momentum, 0.0),
            # torch.optim.AdamW is the one optimizer here that decays by default.
            weight_decay=either(recipe.weight_decay, 0.01 if recipe.name.lower() == "adamw" else 0.0),
            beta1=either(recipe.beta1, 0.9),
            beta2=either(recipe.beta2, 0.99 if recipe.name.lower() in ("lion", "rmsprop") else 0.999),
            epsilon=either(recipe.epsilon, 1e-8),
            global_batch_size=spec.batch.total,
            per_replica_batch_size=spec.batch.per_replica,
            accumulation_steps=spec.batch.accumulation,
            train_steps=spec.train_steps,
            last_step=spec.last_step,
            warmup_steps=spec.warmup_steps,
            schedule=spec.schedule,
            evaluate_every_steps=spec.evaluate_every_steps,
            ema_decay=spec.ema_decay,
            gradient_clip_norm=spec.gradient_clip_norm,
            precision=spec.precision,
            seed=spec.seed,
            data_uri=spec.data_uri,
            parameters=spec.parameters,
            silent=frozenset(name for name, value in optional.items() if value is None),
            ada_scale_batch_size=spec.ada_scale_batch_size,
        )


class Evaluator(Protocol):
    """A task's own way to evaluate. Batches hold held-out examples only, without padding rows."""

    def begins(self) -> None:
        """Called before the first batch. The evaluator itself puts the model into evaluation mode, and back in
        `ends`."""

    def batch(self, batch: Batch, index: int, rows: int) -> None:
        """Called for batch `index` of this process, on the device. `rows` of its examples count: all of them, or 0 in a
        process without examples, which gets one so that it does the same as the others."""

    def ends(self, backend: Backend) -> dict[str, float]:
        """Returns the metrics over all processes; makes the same collectives on each."""


class ShardedStream(Protocol):
    """A stream in parts that can be read by themselves, such as files, so that no process reads what others train on.

    num_shards: how many parts there are; the same in every process and on every slice.
    A stream or a part may have `set_epoch(epoch)`, which is called before it is read. A part may have `skip(count)`,
    which returns the part without its first examples, so that a resumed run need not read them again.
    """

    num_shards: int

    def shard(self, index: int, count: int) -> Iterable[Any]:
        """Returns the examples of part `index` of `count`; `count` is num_shards."""


@dataclass(frozen=True)
class Task:
    """A training task: one model, one dataset, one loss.

    model: on the CPU; the trainer moves it and makes all replicas start from rank 0's weights.
    train: map-style (`len()` and `[i]`), at least one global batch long; what is left over at the end of an epoch is
        dropped. Or an IterableDataset, read in the order in which it comes; every process reads all of it. With
        `state_dict()` and `load_state_dict()` it continues inside an epoch after a resume. Or a `ShardedStream`, of
        which each process reads its own part.
    loss: (model, batch) -> the MEAN loss over the batch, a tensor of shape []; or (sum, weight), two such tensors, for
        a mean over unequal weights (class weights, padding): the step's loss is the sum of all sums divided by the sum
        of all weights.
    optimizer: (parameters, hyperparameters) -> Optimizer; left out, it is made from the recipe's name.
    evaluation: map-style, with `metrics` or with `evaluator`. Evaluated after the training, and during it if the recipe
        has evaluateEverySteps; every example counts once. With `metrics`, several such datasets in
        a mapping by name; their metrics are called NAME/METRIC.
    metrics: (model, batch) -> {name: one value per example, shape [b]}, reported as means over the examples.
    evaluator: instead of `metrics`, for values that are not means over examples.
    collate: a list of examples -> a batch; left out, torch's default_collate.
    evaluation_collate: the same for `evaluation`; left out, `collate`.
    workers: processes per trainer process that read ahead; 0 is none. A stream that is not sharded has none.
    evaluation_workers: the same for `evaluation`, while it lasts; left out, `workers`.
    worker_init: called in each of these processes with its number, before it reads; torch's worker_init_fn.
    evaluation_worker_init: the same for `evaluation`.
    order: (epoch, seed, size) -> the indices of an epoch's examples, in order and the same in every process: weighted,
        by length, with repetitions. Left out, a permutation. For map-style data.
    hooks: what to do around steps, epochs and evaluations.
    scheduler: (optimizer, hyperparameters) -> a torch scheduler, stepped after every step; or a pair of that and
        "epoch". The recipe's warm-up and schedule are not used then.
    finish: called once the last checkpoint is written, in one process of worker 0, with the evaluated model on the CPU
        and in evaluation mode.
    """

    model: nn.Module
    train: Dataset[Any] | ShardedStream
    loss: Callable[[nn.Module, Batch], Tensor | tuple[Tensor, Tensor]]
    optimizer: Callable[[Iterable[nn.Parameter], Hyperparameters], Optimizer] | None = None
    evaluation: Dataset[Any] | Mapping[str, Dataset[Any]] | None = None
    metrics: Metrics | None = None
    collate: Collate | None = None
    workers: int = 0
    evaluator: Evaluator | None = None
    evaluation_collate: Collate | None = None
    evaluation_workers: int | None = None
    worker_init: Callable[[int], object] | None = None
    evaluation_worker_init: Callable[[int], object] | None = None
    order: Orders | None = None
    hooks: Hooks | None = None
    scheduler: Scheduler | tuple[Scheduler, str] | None = None
    finish: Callable[[nn.Module], object] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise ValueError(f"a Task's `model` must be a torch.nn.Module, got {self.model!r:.100}")
        if not callable(self.loss):
            raise ValueError(f"a Task's `loss` must be a function of the model and a batch, got {self.loss!r:.100}")
        if str(getattr(self.loss, "__module__", "")).startswith("torch.nn."):
            name = getattr(self.loss, "__name__", type(self.loss).__name__)
            raise ValueError(
                f"a Task's `loss` is called with the model and a batch, and {name} compares outputs with targets: write"
                f" a function that takes the batch apart and gives {name} what the model makes of it (docs/tasks.md)"
            )
        if isinstance(self.optimizer, Optimizer):
            raise ValueError(
                "a Task's `optimizer` must be a function of the parameters and the hyperparameters that builds one, got"
                f" a {type(self.optimizer).__name__}: its rate would not be scaled to the slice"
            )
        for name, data in (("train", self.train), ("evaluation", self.evaluation)):
            if isinstance(data, DataLoader):
                raise ValueError(
                    f"a Task's `{name}` must be a dataset, got a DataLoader: the trainer makes the batches; give the "
                    "loader's dataset, its collate_fn as `collate` and its num_workers as `workers`"
                )
        if self.metrics is not None and self.evaluator is not None:
            raise ValueError("a Task has `metrics` or an `evaluator`, not both")
        if (self.evaluation is None) != (self.metrics is None and self.evaluator is None):
            raise ValueError("a Task has both `evaluation` and `metrics`, or neither")
        if isinstance(self.evaluation, Mapping) and self.evaluator is not None:
            raise ValueError("a Task's `evaluator` takes one `evaluation` dataset, not a mapping of several")
        for name, count in (("workers", self.workers), ("evaluation_workers", self.evaluation_workers or 0)):
            if count < 0:
                raise ValueError(f"a Task's `{name}` must be 0 or more, got {count}")
        if isinstance(self.scheduler, tuple) and (len(self.scheduler) != 2 or self.scheduler[1] not in _INTERVALS):
            raise ValueError('a Task\'s `scheduler` is a callable, or the pair of one and "step" or "epoch"')
        if self.hooks is not None:
            _check_hooks(self.hooks)


def _check_hooks(hooks: Hooks) -> None:
    """Raises ValueError if they are not hooks, override what the trainer itself needs, or have a method that is named
    almost like a hook, and so would never be called."""
    if not isinstance(hooks, Hooks):
        raise ValueError(f"a Task's `hooks` must be an object of a class derived from tpu_trainer.Hooks, got {hooks!r}")
    mine = {name for kind in type(hooks).__mro__ if kind not in (Hooks, object) for name in vars(kind)}
    if taken := sorted(name for name in mine & set(vars(Hooks)) if not name.startswith("__") and name not in OFFERED):
        raise ValueError(f"a Task's hooks must not override {', '.join(taken)}; they may override {', '.join(OFFERED)}")
    for name in sorted(name for name in mine - set(vars(Hooks)) if callable(getattr(type(hooks), name))):
        meant = get_close_matches(name, OFFERED, n=1, cutoff=_ALMOST)
        if meant and meant[0] not in mine:
            raise ValueError(
                f"a Task's hooks have {name}(), which the trainer does not call; the hook is {meant[0]}(), and a "
                "method of your own needs another name"
            )
