"""Translates the loop's calls into Lightning's hooks, in Lightning's order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tpu_trainer.contract.errors import UserCodeError, user_code
from tpu_trainer.gang.exchange import check_weight, widen
from tpu_trainer.lightning.lightning_run import missing_loss_error, only_under_lightning, skipped_epoch_error
from tpu_trainer.lightning.optimizers import read_configuration
from tpu_trainer.lightning.session import ModuleSession, overrides
from tpu_trainer.task.hooks import Hooks
from tpu_trainer.task.task import Batch, Hyperparameters

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_OWN_KEYS = ("state_dict", "epoch", "global_step")
"""Entries that `on_save_checkpoint` receives; all others are the module's, and are kept."""


class LightningHooks(Hooks):
    """Calls the module's hooks. It keeps no tensor past the end of a step, which would make it a graph output."""

    def __init__(self, session: ModuleSession, hp: Hyperparameters) -> None:
        self._session, self._view, self._hp = session, session.view, hp
        self.clips = session.has("configure_gradient_clipping")
        if hp.gradient_clip_norm is not None:
            self._view.gradient_clip_val, self._view.gradient_clip_algorithm = hp.gradient_clip_norm, "norm"
        # The epoch, and how many of its examples a checkpoint had used: 0 once the epoch has begun in this process.
        self._begun = (0, 0)
        self._index = -1
        self._pass = 0
        self._batch: Batch = None
        self._outputs: dict[str, Any] = {}

    def configure(self, parameters: Iterable[nn.Parameter], hp: Hyperparameters) -> Optimizer:
        """Returns the module's optimizer: the task's `optimizer`. The module is on its device."""
        session = self._session
        with user_code("configure_optimizers"):
            returned = session.module.configure_optimizers()  # type: ignore[operator]
        optimizer, scheduler = read_configuration(returned)
        self.scheduled = () if scheduler is None else (scheduler,)
        if scheduler is not None and scheduler.monitor is not None and hp.evaluate_every_steps is None:
            # Lightning's Trainer evaluates at the end of every epoch.
            raise only_under_lightning("ReduceLROnPlateau without recipe.evaluateEverySteps")
        self._view.optimizers = [optimizer]
        self._view.lr_scheduler_configs = list(self.scheduled)
        return optimizer

    def loss(self, model: nn.Module, batch: Batch) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the loss of the batch that `step_begins` received: the task's `loss`.

        "loss_weight" beside "loss" in a dict is the weight of a mean. The module returns the mean itself, so that
        Lightning's own Trainer can train it, too.
        """
        returned = self._session.step("training_step", self._batch, self._index)
        outputs = returned if isinstance(returned, Mapping) else {"loss": returned}
        loss = outputs.get("loss")
        if not isinstance(loss, Tensor):
            if loss is None:
                raise missing_loss_error()
            raise UserCodeError(
                f"training_step: the loss is a {type(loss).__name__}; training_step must return a tensor, or a dict "
                'with the tensor "loss"'
            )
        self._outputs = {key: value.detach() if isinstance(value, Tensor) else value for key, value in outputs.items()}
        weight = outputs.get("loss_weight")
        if weight is None:
            return loss
        if not isinstance(weight, Tensor):
            raise UserCodeError(f'training_step: "loss_weight" must be a tensor, got {type(weight).__name__}')
        check_weight(weight, 'training_step: "loss_weight"')
        return widen(loss) * widen(weight), weight

    @property
    def changes_gradients(self) -> bool:
        return self._session.has("on_after_backward") or self._session.has("on_before_optimizer_step")

    def step_made(self, step: int) -> None:
        self._view.global_step = step
        self._view.current_epoch, _ = self._begun

    @property
    def remarks(self) -> Sequence[str]:
        return self._session.remarks

    def fit_begins(self, optimizer: Optimizer, step: int) -> None:
        self._session.call("on_fit_start")

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        session, view = self._session, self._view
        logged, in_training = dict(view.callback_metrics), list(session.log.metrics)
        view.sanity_checking = True
        yield
        view.sanity_checking = False
        view.callback_metrics.clear()
        view.callback_metrics.update(logged)
        session.log.metrics[:] = in_training

    def train_begins(self) -> None:
        self._session.call("on_train_start")

    def epoch_begins(self, epoch: int) -> None:
        begun, examples = self._begun
        steps = examples // self._hp.global_batch_size if epoch == begun else 0
        self._begun = (epoch, 0)
        self._index = steps * self._hp.accumulation_steps - 1
        self._view.current_epoch = epoch
        self._session.call("on_train_epoch_start")

    def step_begins(self, batch: Batch, step: int) -> None:
        self._index += 1
        self._batch = self._session.move(batch)
        if self._session.call("on_train_batch_start", self._batch, self._index) == -1:
            raise skipped_epoch_error()

    def before_backward(self, loss: Tensor) -> None:
        if self._pass == 0:
            self._session.call("on_before_zero_grad", *self._view.optimizers)
        self._session.call("on_before_backward", loss)

    def after_backward(self) -> None:
        self._session.call("on_after_backward")
        self._pass += 1
        if self._pass < self._hp.accumulation_steps:
            self._batch_ends()

    def before_update(self, optimizer: Optimizer) -> None:
        self._session.call("on_before_optimizer_step", optimizer)
        if self.clips:
            view = self._view
            clipping = {name: getattr(view, name) for name in ("gradient_clip_val", "gradient_clip_algorithm")}
            self._session.call("configure_gradient_clipping", optimizer, **clipping)

    def after_step(self, batch: Batch, loss: Tensor, step: int) -> None:
        self._pass = 0
        self._batch_ends()

    def epoch_ends(self, epoch: int) -> None:
        self._session.call("on_train_epoch_end")
        self._session.log.epoch_ends()

    def train_ends(self, *, stopped: bool) -> None:
        if not stopped:
            # Lightning counts the epoch before it calls on_train_end.
            self._view.current_epoch += 1
        self._session.call("on_train_end")
        self._session.trained = True

    def ended_before(self) -> None:
        self._session.trained = True

    def fit_ends(self) -> None:
        self._session.call("on_fit_end")
        self._session.call_both("teardown", "fit")

    def failed(self, error: BaseException) -> None:
        self._session.call_both("on_exception", error)

    def state(self) -> dict[str, Any]:
        steps = (self._index + 1) // self._hp.accumulation_steps
        state: dict[str, Any] = {"epoch": self._begun[0], "examples": steps * self._hp.global_batch_size}
        if self._session.has("on_save_checkpoint"):
            checkpoint = self._checkpoint()
            self._session.call("on_save_checkpoint", checkpoint)
            state["module"] = {key: value for key, value in checkpoint.items() if key not in _OWN_KEYS}
        if overrides(self._session.data, "state_dict"):
            with user_code("state_dict of the LightningDataModule"):
                state["data"] = self._session.data.state_dict()
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        self._begun = (state["epoch"], state["examples"])
        if self._session.has("on_load_checkpoint"):
            self._session.call("on_load_checkpoint", {**self._checkpoint(), **state.get("module", {})})
        if overrides(self._session.data, "load_state_dict") and "data" in state:
            with user_code("load_state_dict of the LightningDataModule"):
                self._session.data.load_state_dict(state["data"])

    def _checkpoint(self) -> dict[str, Any]:
        view = self._view
        return {
            "state_dict": self._session.module.state_dict(),
            "epoch": view.current_epoch,
            "global_step": view.global_step,
        }

    def _batch_ends(self) -> None:
        outputs, batch = self._outputs, self._batch
        self._outputs, self._batch = {}, None
        self._session.call("on_train_batch_end", outputs, batch, self._index)

    def advance_scheduler(self, scheduler: Any, metric: float | None) -> None:
        if self._session.has("lr_scheduler_step"):
            self._session.call("lr_scheduler_step", scheduler, metric)
        elif metric is not None:
            scheduler.step(metric)
        else:
            scheduler.step()
