"""What surrounds a step where Lightning's loop makes it: signals, checkpoints, reports, the doctor, the run's end.

The methods of Lightning's Callback, in the place of `loop`: after every step all replicas read the same sums, and so
decide alike whether the run ends, stops or keeps a checkpoint.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Any

import torch

from tpu_trainer.contract.clock import Phase
from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.contract.findings import Finding
from tpu_trainer.data.loading import Position, random_seed
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.gang.exchange import Signals
from tpu_trainer.lightning.session import is_metric
from tpu_trainer.lightning.validation import differing, of_own_part
from tpu_trainer.lightning_trainer.callbacks import not_continued
from tpu_trainer.lightning_trainer.gradients import Gradients
from tpu_trainer.lightning_trainer.loaders import Place
from tpu_trainer.lightning_trainer.state import check_state
from tpu_trainer.lightning_trainer.strategy import HERE
from tpu_trainer.loop.instruments import Instruments
from tpu_trainer.task.task import Hyperparameters


class GangTrainer:
    """Lightning's Trainer, whose `should_stop` cannot send one replica out of the loop alone: set within a batch, it is
    a wish, which all replicas learn of at the end of their next step. Elsewhere callbacks have agreed on it already.
    Nor does a callback change how many passes make a step.
    """

    in_batch = False
    wished = False
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
            self.wished = self.wished or ends
        else:
            self._ends = ends

    def agree(self, ends: bool) -> None:
        """Before Lightning looks, and evaluates before it ends."""
        self._ends, self.wished = ends, False


class StoppedError(Exception):
    """Ends Lightning's loop after the checkpoint of a run that was told to stop."""


class First:
    """Tells the watch what it must know before all other callbacks: that an epoch begins, which a run that continues
    there begins again, with them; and that a validation is over, before they give the module its own weights back."""

    gang_order = -1

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._watch.epoch_begins(trainer, module)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self._watch.buffers.close()


class Watch:
    """`step`: steps done. `loss`: the global loss of the last one that was read. `metrics`: of the last evaluation.

    `ends_epoch`: the run continues after an epoch's last batch, whose end is not done. `rate`: the present learning
    rate. `keeps`: the run has a place for checkpoints. `kept`: what the checkpoint that
    the run continues from has of `Watch.kept`.
    """

    gang_order = 1

    def __init__(
        self,
        backend: Backend,
        hp: Hyperparameters,
        instruments: Instruments,
        gradients: Gradients,
        rate: Callable[[], float],
        place: Place,
        kept: Mapping[str, Any],
        *,
        keeps: bool,
    ) -> None:
        super().__init__()
        self._backend, self._hp, self._instruments, self._gradients = backend, hp, instruments, gradients
        self._rate, self._before, self._keeps = rate, kept, keeps
        self.kept: dict[str, Any] = {}
        self._state_of_parts: dict[str, list[str]] = {}
        self.step = instruments.first
        self.place = place
        self.loss: float | None = None
        self.ends_epoch = False
        self.metrics: dict[str, float] = {}
        self.logged: set[str] = set()
        self.own: dict[str, Any] = {}
        self._signals = Signals(backend, self.step)
        self._seen: int | None = None
        self._saved: int | None = None
        self._postponed = self._told = False
        self._evaluation, self.buffers = ExitStack(), ExitStack()

    # Training.

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._seen = trainer.global_step
        if self._before:
            self._restore(trainer, module)
        if self._keeps:
            self._check_state(trainer, module)
            for text in not_continued(trainer.callbacks):
                self._instruments.outputs.add_finding(Finding("Lightning", self.step, text))
        # Lightning would ask in every step whether rank 0 was told to stop, with a collective of its own.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        self._instruments.settle(self.step)
        self._instruments.clock.enter(Phase.HOST)

    def _check_state(self, trainer: Any, module: Any) -> None:
        state: dict[str, Any] = {}
        # A hook may keep what only a step makes. The first checkpoint says so then.
        with suppress(Exception):
            state = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        check_state(state, module)

    def epoch_begins(self, trainer: Any, module: Any) -> None:
        if self._postponed:
            self._note_parts(module)
            self._save(trainer, epoch_begins=True)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._instruments.settle(self.step)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        trainer.in_batch = True
        count = self.step * self._hp.accumulation_steps + batch_idx % self._hp.accumulation_steps + 1
        self._gradients.seed(random_seed(self._hp.seed, count, self._backend.drawing_rank))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if module.automatic_optimization and trainer.global_step == self._seen:
            # Traced together, the activations of all passes would be alive at once.
            self._backend.sync()
            return
        self._seen = trainer.global_step
        epoch = trainer.current_epoch
        self.place = Place(epoch + 1) if trainer.is_last_batch else Place(epoch, batch_idx + 1)
        self.step += 1
        self._end_step(trainer, batch, list(module.parameters()))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.in_batch = False

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Reached also by a run that a callback or the module has ended early."""
        if self._signals.read_through < self.step or self._saved != self.step:
            self._read(self.step, whole=True)
            self._note_parts(module)
            self._save(trainer)
            self._instruments.after_step(self._signals, self.step, ends=True)

    def ended(self, trainer: Any) -> None:
        """Takes the state once more, which the hooks of the training's end may have changed; called after all of
        them."""
        if self._keeps:
            self._note_parts(trainer.lightning_module)
            self._take(trainer)

    @property
    def position(self) -> Position:
        batches = self.place.batches // self._hp.accumulation_steps
        return Position(self.place.epoch, batches * self._hp.global_batch_size)

    def _note_parts(self, module: Any) -> None:
        """Not at the end of a validation, where all of the module is in evaluation mode."""
        self._state_of_parts = {
            "trained": [name for name, one in module.named_parameters() if one.requires_grad],
            "frozen": [name for name, one in module.named_parameters() if not one.requires_grad],
            "inTraining": [name for name, one in module.named_modules() if one.training],
            "resting": [name for name, one in module.named_modules() if not one.training],
        }

    def _restore(self, trainer: Any, module: Any) -> None:
        """What Lightning does not keep, and callbacks that freeze, unfreeze or wait for metrics need."""
        before = {
            name: frozenset(self._before.get(name, ())) for name in ("trained", "frozen", "inTraining", "resting")
        }
        # Callbacks that prune give parameters other names, which are theirs to restore.
        for name, parameter in module.named_parameters():
            if name in before["trained"] | before["frozen"]:
                parameter.requires_grad_(name in before["trained"])
        for name, child in module.named_modules():
            if name in before["inTraining"] | before["resting"]:
                child.training = name in before["inTraining"]
        known = {name: torch.tensor(value) for name, value in self._before["metrics"].items()}
        trainer.callback_metrics.update(known)
        # Otherwise Lightning would leave out schedulers that wait for metrics at the end of this epoch.
        trainer.fit_loop._restarting = False
        if self.ends_epoch:
            loop = trainer.fit_loop.epoch_loop
            # Lightning would leave out the validation after the last batch, for which the stopped run had no time.
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
        # Raises if the loss is not finite, before a checkpoint is made of it.
        if (reading := self._read(step, whole=saves or last)) is not None:
            stopping, saves = reading.stopping and not last, saves or reading.saving
            ends = any(asked for (asked,) in self._backend.gather([float(trainer.wished)])) or last
            trainer.agree(ends)
        if saves or last or stopping:
            self._note_parts(trainer.lightning_module)
        if last or stopping:
            self._save(trainer, now=stopping)
        elif saves:
            self._save_soon(trainer)
        instruments.after_step(self._signals, step, ends=last or stopping)
        if stopping:
            raise StoppedError

    def _read(self, step: int, *, whole: bool) -> Any:
        reading = self._instruments.read(self._signals, step, self._rate(), read_all=whole)
        if reading is not None:
            self.loss = reading.losses[-1]
        return reading

    def _save_soon(self, trainer: Any) -> None:
        """After what belongs to a step: its validation, the end of its epoch. A run that continued without them would
        know fewer metrics, and callbacks and schedulers that wait for metrics would decide otherwise."""
        loop = trainer.fit_loop
        if trainer.is_last_batch or loop.epoch_loop._should_check_val_fx(loop._data_fetcher):
            self._postponed = True
        else:
            self._save(trainer)

    def _save(self, trainer: Any, *, now: bool = False, epoch_begins: bool = False) -> None:
        self._saved, self._postponed = self.step, False
        if self._keeps:
            self._take(trainer, epoch_begins=epoch_begins)
        closes = self.step == self._hp.last_step or trainer.should_stop
        self._instruments.save(self.step, self.position, now=now, closes=closes)

    def _take(self, trainer: Any, *, epoch_begins: bool = False) -> None:
        self.kept = {
            "place": asdict(self.place),
            "epochBegins": epoch_begins,
            "loss": self.loss,
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            **self._state_of_parts,
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
        # One model is validated, rank 0's, also if a callback has just put an average in its place.
        self.buffers.enter_context(self._instruments.buffers.lent())

    def on_validation_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
        self._backend.sync()

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._backend.sync()
        if trainer.sanity_checking:
            self._evaluation.close()
        else:
            self.metrics = {
                name: float(value)
                for name, value in trainer.callback_metrics.items()
                if name.partition("/dataloader_idx_")[0] in self.logged
            }
            # After the metrics have been read off the device.
            self._evaluation.close()
            self._instruments.outputs.add_evaluation(self.step, self.metrics)
            self._tell_own()
            if self._postponed and not trainer.is_last_batch:
                self._save(trainer)

    def _tell_own(self) -> None:
        """Says once which numbers of the module depend on how many processes there are."""
        own = {name: float(value) for name, value in self.own.items()}
        self.own.clear()
        named = float(zlib.crc32("\n".join(own).encode()) % 2**24)
        if self._told or len({row[0] for row in self._backend.gather([named])}) > 1:
            return
        if names := differing(own, self._backend):
            self._told = True
            self._instruments.outputs.add_finding(Finding("Evaluation", self.step, of_own_part(names)))


def log_everywhere(module: Any, logged: set[str], own: dict[str, Any]) -> None:
    """Has what a module logs in validation reduced over all processes, whatever it says of `sync_dist`: a metric of one
    process's examples would be shown as the run's. `logged` takes their names, `own` the plain numbers that the module
    logs at an evaluation's end.

    A progress bar, which is not shown, would read every value off the device in every step.
    """
    original = module.log
    parameters = inspect.signature(original)

    def log(*args: Any, **options: Any) -> None:
        given = parameters.bind(*args, **options).arguments
        given["prog_bar"] = False
        if not module.trainer.training:
            logged.add(given["name"])
            at_end = module._current_fx_name == "on_validation_epoch_end" and not module.trainer.sanity_checking
            if at_end and not is_metric(given["value"]) and not given.get("sync_dist"):
                own[given["name"]] = given["value"]
            if not given.get("rank_zero_only"):
                given["sync_dist"] = True
        original(**given)

    module.log = log
