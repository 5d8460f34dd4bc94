"""Surrounds the steps of Lightning's loop with the trainer's: signals, checkpoints, reports, the doctor, the run's end.

`GangCallback` takes the place of `loop`: after every step all replicas read the same sums, and so decide alike whether
the run ends, stops or keeps a checkpoint. Lightning's own callbacks that contradict the recipe are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import torch

from tpu_contract.protocol import Phase
from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.contract.findings import Finding
from tpu_trainer.data.order import Position, random_seed
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.gang.exchange import Signals
from tpu_trainer.gang.gather import is_shared
from tpu_trainer.lightning.lightning_run import skipped_epoch_error
from tpu_trainer.lightning.session import LIGHTNING, is_metric
from tpu_trainer.lightning.validation import check_name, describe_local_numbers, differ
from tpu_trainer.lightning_trainer.gradients import Gradients
from tpu_trainer.lightning_trainer.state import HERE, check_state
from tpu_trainer.loop.instruments import Instruments
from tpu_trainer.task.task import Hyperparameters

_REFUSED = {
    "LearningRateFinder": (
        "it trains at other rates than recipe.learningRate. Run it separately and write the rate that it finds into "
        "the recipe"
    ),
    "BatchSizeFinder": "the batch size follows from recipe.globalBatchSize and the slice. Leave it out",
    "GradientAccumulationScheduler": (
        "how many passes make a step follows from recipe.globalBatchSize and the slice. Leave it out"
    ),
    "StochasticWeightAveraging": (
        "a run that resumes inside an epoch loses its average. Use WeightAveraging from the same package, whose "
        "should_update decides when averaging starts, with the recipe's schedule"
    ),
}


_NOT_CONTINUED = {
    "ModelPruning": (
        "a checkpoint keeps the weights but not which of them are pruned, so a resumed run may train pruned weights "
        "again and end with fewer zeros than an uninterrupted one"
    ),
}


class GangTrainer:
    """Lightning's Trainer, but no replica leaves the loop alone: `should_stop`, set within a batch, is a request that
    all replicas agree on at the end of the step. Elsewhere callbacks have agreed on it already. A callback cannot
    change the number of passes of a step.
    """

    in_batch = False
    stop_requested = False
    _ends = False
    _passes: int | None = None

    @property
    def accumulate_grad_batches(self) -> int | None:
        return self._passes

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, passes: int) -> None:
        if self._passes not in (None, passes):
            raise UserCodeError(
                f"trainer.accumulate_grad_batches was set to {passes}: by recipe.globalBatchSize and the slice a step "
                f"has {self._passes} passes"
            )
        self._passes = passes

    @property
    def should_stop(self) -> bool:
        return self._ends

    @should_stop.setter
    def should_stop(self, ends: bool) -> None:
        if self.in_batch:
            self.stop_requested = self.stop_requested or ends
        else:
            self._ends = ends

    def agree(self, ends: bool) -> None:
        """Sets what all replicas agreed on, before Lightning reads it and runs a last validation."""
        self._ends, self.stop_requested = ends, False


class StoppedError(Exception):
    """Ends Lightning's loop after the checkpoint of a run that is to stop."""


class FirstCallback:
    """Runs before all other callbacks. A checkpoint at the start of an epoch precedes their hooks, which a resumed run
    calls again; after a validation the buffers are put back before callbacks restore the module's weights."""

    gang_order = -1

    def __init__(self, last: GangCallback) -> None:
        super().__init__()
        self._last = last

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._last.epoch_begins(trainer, module)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self._last.buffers.close()


class GangCallback:
    """Runs after all other callbacks. `step`: steps done. `loss`: the last global loss that was read. `metrics`: those
    of the last evaluation.

    `begins_epoch`: the run resumes at the beginning of an epoch. `ends_batch`: it resumes between a step and what
    follows from it, which is its validation, schedulers and an epoch's end. `rate` returns the learning rate. `keeps`:
    the run stores checkpoints. `document`: the document of the checkpoint that the run resumes from, which holds an
    earlier `entries`.
    """

    gang_order = 1

    def __init__(
        self,
        backend: Backend,
        hp: Hyperparameters,
        instruments: Instruments,
        gradients: Gradients,
        rate: Callable[[], float],
        position: Position,
        document: Mapping[str, Any],
        *,
        keeps: bool,
    ) -> None:
        super().__init__()
        self._backend, self._hp, self._instruments, self._gradients = backend, hp, instruments, gradients
        self._rate, self._document, self._keeps = rate, document, keeps
        self.entries: dict[str, Any] = {}
        self._modes: dict[str, list[str]] = {}
        self.step = instruments.first
        self.position = position
        self.loss: float | None = None
        self.begins_epoch = self.ends_batch = False
        self.metrics: dict[str, float] = {}
        self.logged: set[str] = set()
        self.local: dict[str, Any] = {}
        self._signals = Signals(backend, self.step)
        self._seen: int | None = None
        self._saved: int | None = None
        self._postponed = False
        self._evaluation, self.buffers = ExitStack(), ExitStack()

    # Training.

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._seen = trainer.global_step
        if self._document:
            self._restore(trainer, module)
        if self._keeps:
            self._check_state(trainer, module)
            for text in find_not_resumable(trainer.callbacks):
                self._instruments.outputs.add_finding(Finding("Lightning", self.step, text))
        # In every step Lightning would broadcast whether rank 0 has received SIGTERM.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        hook = module.on_train_batch_end

        def end_batch(outputs: Any, batch: Any, batch_idx: int) -> None:
            hook(outputs, batch, batch_idx)
            self._end_batch(trainer, module, batch, batch_idx)

        # Lightning calls the module after all callbacks; what it changes belongs to the step and its checkpoint.
        module.on_train_batch_end = end_batch
        self._instruments.clock.enter(Phase.HOST)

    def _check_state(self, trainer: Any, module: Any) -> None:
        state: dict[str, Any] = {}
        # A hook may need what only a step makes; then the first checkpoint reports what it cannot keep.
        with suppress(Exception):
            state = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        check_state(state, module)

    def epoch_begins(self, trainer: Any, module: Any) -> None:
        if self._postponed:
            self._note_modes(module)
            self._save(trainer, epoch_begins=True)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        trainer.in_batch = True
        count = self.step * self._hp.accumulation_steps + batch_idx % self._hp.accumulation_steps + 1
        self._gradients.seed(random_seed(self._hp.seed, count, self._backend.drawing_rank))

    def _end_batch(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if module.automatic_optimization and trainer.global_step == self._seen:
            # In one graph the activations of all passes would be alive at once.
            self._backend.sync()
            return
        self._seen = trainer.global_step
        epoch = trainer.current_epoch
        offset = (batch_idx + 1) // self._hp.accumulation_steps * self._hp.global_batch_size
        self.position = Position(epoch + 1) if trainer.is_last_batch else Position(epoch, offset)
        self.step += 1
        self._end_step(trainer, batch, list(module.parameters()))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.in_batch = False
        batches = trainer.fit_loop.epoch_loop.batch_progress.current
        if batches.started < batches.ready:
            raise skipped_epoch_error()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Saves the last step, also of a run that a callback or the module has ended early."""
        if self._signals.read_through < self.step or self._saved != self.step:
            self._read(self.step, read_all=True)
            self._note_modes(module)
            self._save(trainer)
            self._instruments.after_step(self._signals, self.step, ends=True)

    def take_final_state(self, trainer: Any) -> None:
        """Takes the state again after all hooks of the training's end, which may have changed it."""
        if self._keeps:
            self._note_modes(trainer.lightning_module)
            self._take_state(trainer)

    def _note_modes(self, module: Any) -> None:
        """Notes which parameters and modules are trained; not called at the end of a validation, where none is."""
        self._modes = {
            "trained": [name for name, parameter in module.named_parameters() if parameter.requires_grad],
            "frozen": [name for name, parameter in module.named_parameters() if not parameter.requires_grad],
            "inTraining": [name for name, child in module.named_modules() if child.training],
            "resting": [name for name, child in module.named_modules() if not child.training],
        }

    def _restore(self, trainer: Any, module: Any) -> None:
        """Restores what Lightning does not, for callbacks that freeze, unfreeze or wait for metrics, and for modules
        that accumulate by themselves."""
        before = {
            name: frozenset(self._document.get(name, ())) for name in ("trained", "frozen", "inTraining", "resting")
        }
        # Callbacks that prune rename parameters, and restore those themselves.
        for name, parameter in module.named_parameters():
            if name in before["trained"] | before["frozen"]:
                parameter.requires_grad_(name in before["trained"])
        for name, child in module.named_modules():
            if name in before["inTraining"] | before["resting"]:
                child.training = name in before["inTraining"]
        for name, gradient in trainer.strategy.kept_gradients.items():
            parameter = module.get_parameter(name)
            parameter.grad = gradient.to(parameter.device)
        metrics = {name: torch.tensor(value) for name, value in self._document["metrics"].items()}
        trainer.callback_metrics.update(metrics)
        # Otherwise Lightning would skip schedulers that wait for metrics at the end of this epoch.
        trainer.fit_loop._restarting = False
        loop = trainer.fit_loop.epoch_loop
        if self.begins_epoch:
            # Lightning would make an update of schedulers before the first step.
            loop.restarting = False
        if self.ends_batch:
            # Lightning would begin with the next batch.
            loop.val_loop.restarting = False
            loop.advance = lambda fetcher: delattr(loop, "advance")

    def _end_step(self, trainer: Any, batch: Any, parameters: list[Any]) -> None:
        instruments, step = self._instruments, self.step
        last = step == self._hp.last_step
        sums = self._gradients.signals(step)
        with instruments.sync(step, batch, parameters):
            self._backend.sync()
        self._signals.add(sums)
        saves, stopping, ends = instruments.checkpoints.due(step), False, last
        # Raises if the loss is not finite, before a checkpoint is taken.
        if (reading := self._read(step, read_all=saves or last)) is not None:
            stopping, saves = reading.stopping and not last, saves or reading.saving
            ends = any(requested for (requested,) in self._backend.gather([float(trainer.stop_requested)])) or last
            trainer.agree(ends)
        if saves or last or stopping:
            self._note_modes(trainer.lightning_module)
        if last or stopping:
            self._save(trainer, now=stopping, in_batch=True)
        elif saves:
            self._save_soon(trainer)
        instruments.after_step(self._signals, step, ends=last or stopping)
        if stopping:
            raise StoppedError

    def _read(self, step: int, *, read_all: bool) -> Any:
        reading = self._instruments.read(self._signals, step, self._rate(), read_all=read_all)
        if reading is not None:
            self.loss = reading.losses[-1]
        return reading

    def _save_soon(self, trainer: Any) -> None:
        """Saves after the step's validation and the end of its epoch, if they are due: without their metrics, callbacks
        and schedulers of a resumed run would decide differently."""
        loop = trainer.fit_loop
        if trainer.is_last_batch or loop.epoch_loop._should_check_val_fx(loop._data_fetcher):
            self._postponed = True
        else:
            self._save(trainer, in_batch=True)

    def _save(self, trainer: Any, *, now: bool = False, in_batch: bool = False, epoch_begins: bool = False) -> None:
        self._saved, self._postponed = self.step, False
        if self._keeps:
            self._take_state(trainer, in_batch=in_batch, epoch_begins=epoch_begins)
        closes = self.step == self._hp.last_step or trainer.should_stop
        self._instruments.save(self.step, self.position, now=now, closes=closes)

    def _take_state(self, trainer: Any, *, in_batch: bool = False, epoch_begins: bool = False) -> None:
        self.entries = {
            "inBatch": in_batch,
            "epochBegins": epoch_begins,
            "loss": self.loss,
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            **self._modes,
        }
        trainer.save_checkpoint(HERE)

    # Validation.

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        trainer.in_batch = False
        self._evaluation.enter_context(self._instruments.clock.during(Phase.EVALUATE))
        self._evaluation.enter_context(self._instruments.doctor.set_aside())
        self._backend.sync()
        if not trainer.sanity_checking:
            self._instruments.evaluated = self.step, self._instruments.weights()

    def on_validation_epoch_start(self, trainer: Any, module: Any) -> None:
        # Rank 0's buffers are validated, also if a callback has just swapped in averaged weights.
        self.buffers.enter_context(self._instruments.buffers.lent())

    def on_validation_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
        self._backend.sync()

    def end_validation(self, trainer: Any) -> None:
        """Called after all hooks of the validation's end."""
        self._backend.sync()
        if trainer.sanity_checking:
            self._evaluation.close()
        else:
            self.metrics = {
                name: float(value)
                for name, value in trainer.callback_metrics.items()
                if name.partition("/dataloader_idx_")[0] in self.logged
            }
            # Closed after the metrics are read from the device, which is part of the evaluation.
            self._evaluation.close()
            self._instruments.outputs.add_evaluation(self.step, self.metrics)
            self._warn_of_local_numbers()
            if self._postponed and not trainer.is_last_batch:
                self._save(trainer)

    def _warn_of_local_numbers(self) -> None:
        """Warns once which numbers of the module depend on the number of processes."""
        local = {name: float(value) for name, value in self.local.items()}
        self.local.clear()
        if not is_shared("\n".join(local), self._backend):
            return
        rows = self._backend.gather(list(local.values()))
        if names := [name for name, numbers in zip(local, zip(*rows, strict=True), strict=True) if differ(numbers)]:
            self._instruments.outputs.add_finding(Finding("Evaluation", self.step, describe_local_numbers(names)))


def log_everywhere(module: Any, logged: set[str], local: dict[str, Any]) -> None:
    """Makes `module.log` reduce validation values over all processes, whatever `sync_dist` is: otherwise one process's
    metric would be reported as the run's. So are values that a scheduler waits for, or each replica would set its own
    rate. `logged` takes the names, `local` the plain numbers logged at the end of an evaluation.

    The progress bar is not shown, but would read every value from the device in every step.
    """
    original = module.log
    parameters = inspect.signature(original)

    def log(*args: Any, **options: Any) -> None:
        arguments = parameters.bind(*args, **options).arguments
        arguments["prog_bar"] = False
        name, validates = arguments["name"], not module.trainer.training
        if validates:
            check_name(name)
            logged.add(name)
            at_end = module._current_fx_name == "on_validation_epoch_end" and not module.trainer.sanity_checking
            if at_end and not is_metric(arguments["value"]) and not arguments.get("sync_dist"):
                local[name] = arguments["value"]
        monitors = [config.monitor for config in module.trainer.lr_scheduler_configs if config.reduce_on_plateau]
        is_awaited = any(monitor in (name, f"{name}_step", f"{name}_epoch") for monitor in monitors)
        if (validates or is_awaited) and not arguments.get("rank_zero_only"):
            arguments["sync_dist"] = True
        original(**arguments)

    module.log = log


def refuse_callbacks(callbacks: Iterable[object]) -> None:
    """Raises UserCodeError for a callback that contradicts the recipe or loses its state."""
    for text in _texts_of(callbacks, _REFUSED):
        raise UserCodeError(text)


def find_not_resumable(callbacks: Iterable[object]) -> Iterator[str]:
    """Yields a warning for each callback that keeps too little in a checkpoint."""
    return _texts_of(callbacks, _NOT_CONTINUED)


def _texts_of(callbacks: Iterable[object], texts: Mapping[str, str]) -> Iterator[str]:
    for callback in callbacks:
        for owner in type(callback).__mro__:
            if owner.__name__ in texts and owner.__module__.partition(".")[0] in LIGHTNING:
                yield f"callback {type(callback).__name__}: {texts[owner.__name__]}"
