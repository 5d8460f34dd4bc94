"""Lightning's Strategy for a gang whose processes exist already and exchange data through the backend.

`package.derive` makes subclasses of Lightning's classes from the classes here.
"""

from __future__ import annotations

import importlib
import math
import pickle
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.data.order import Share
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.gang.exchange import check_weight
from tpu_trainer.gang.gather import DifferentiableTable, table, total
from tpu_trainer.lightning.lightning_run import missing_loss_error
from tpu_trainer.lightning.validation import connect, metrics_of
from tpu_trainer.lightning_trainer.callbacks import GangCallback, refuse_callbacks
from tpu_trainer.lightning_trainer.gradients import Gradients
from tpu_trainer.lightning_trainer.loaders import Division
from tpu_trainer.lightning_trainer.rates import OptimizerRates
from tpu_trainer.lightning_trainer.state import HERE
from tpu_trainer.task.task import Hyperparameters

if TYPE_CHECKING:
    from torch.optim import Optimizer

_GRADIENTS = "tpu_trainer_gradients"
"""The key of the gradients of a module that accumulates by itself."""

_RATES = "tpu_trainer_rates"
"""The key of the rates' state in a file that the module or a callback saves, and may load in the same run."""


class GangStrategy:
    """One replica's strategy. Lightning calls its hooks last, after those of callbacks and module.

    `state`: the state that Lightning saved last under `HERE`, or will load from there; `kept_rates`: its rates;
    `kept_gradients`: its gradients, of a module that accumulates by itself.
    """

    strategy_name = "tpu_trainer"

    def __init__(
        self,
        backend: Backend,
        share: Share,
        gradients: Gradients,
        division: Division,
        hp: Hyperparameters,
        rates: OptimizerRates,
        callback: GangCallback,
    ) -> None:
        super().__init__()
        self._backend, self._gradients, self._division = backend, gradients, division
        self._hp, self._rates, self._callback = hp, rates, callback
        self._placed = False
        self.world_size, self.global_rank, self.local_rank = share.world, share.rank, share.local_rank
        # As if every process were a node of one device: only the product of the two is right everywhere.
        self.num_nodes = share.world
        self.node_rank = share.rank
        self.state: Any = None
        self.kept_rates: list[Any] = []
        self.kept_gradients: dict[str, Tensor] = {}
        self._weight: Tensor | None = None
        self._messages = 0
        self._on_sigterm = signal.getsignal(signal.SIGTERM)

    # Devices and ranks.

    @property
    def root_device(self) -> torch.device:
        return self._backend.device

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning's log reduces values."""
        return self._backend.terms > 1

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def model_to_device(self) -> None:
        """Places the model, with rank 0's weights in every replica; once, also if a validation follows the training."""
        if not self._placed:
            self._backend.place(self.lightning_module)
        metrics: list[Any] = metrics_of(self.lightning_module) if self._placed else []
        for metric in metrics:
            # At the end of a training Lightning moves logged metric objects to the host.
            metric.to(self.root_device)
        self._placed = True

    def setup_environment(self) -> None:
        super().setup_environment()  # type: ignore[misc]
        # Lightning's functions for "only in the first process" look for the rank there.
        rank_zero: Any = importlib.import_module("lightning_utilities.core.rank_zero")
        rank_zero.rank_zero_only.rank = self.global_rank
        trainer = self.lightning_module.trainer
        # By now they include those of configure_callbacks.
        refuse_callbacks(trainer.callbacks)
        # The gang's callback runs last: no other may change what the replicas have agreed on after a step.
        trainer.callbacks.sort(key=lambda callback: getattr(callback, "gang_order", 0))
        for callback in trainer.checkpoint_callbacks:
            # The default is beside the logger's files, which belong to one attempt.
            if getattr(callback, "dirpath", "none") is None:
                callback.dirpath = f"{trainer.default_root_dir}/checkpoints"

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)  # type: ignore[misc]
        connect(metrics_of(self.lightning_module), self._backend)

    def setup_optimizers(self, trainer: Any) -> None:
        # Optimizers and schedulers may read the number of epochs, which follows from the steps and the data.
        trainer.fit_loop.setup_data()
        epochs, start = None, self._callback.position
        steps = trainer.num_training_batches / self._hp.accumulation_steps
        if 0 < steps < math.inf:
            # Lightning steps no scheduler after an incomplete last epoch.
            epochs = int(self._hp.train_steps / steps)
            # Earlier epochs may have had another length.
            rest = self._hp.train_steps - self._callback.step + start.offset // self._hp.global_batch_size
            trainer.fit_loop.max_epochs = start.epoch + math.ceil(rest / steps)
        super().setup_optimizers(trainer)  # type: ignore[misc]
        _check_held(self.lightning_module, self.optimizers)
        self._rates.build(self.lightning_module, self.optimizers, self.lr_scheduler_configs, epochs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        load = super().load_optimizer_state_dict  # type: ignore[misc]
        if _RATES in checkpoint:
            load(checkpoint)
            self._rates.rewind(checkpoint[_RATES])
        else:
            self._rates.keep_over(lambda: load(checkpoint), self.optimizers, self.kept_rates)

    def teardown(self) -> None:
        """Leaves the model on its device, where the job still needs it."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # Steps.

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        trainer = self.lightning_module.trainer
        if trainer.training and not trainer.in_batch:
            # After a validation or the end of an epoch: the step would be compiled with what they left pending.
            self._gradients.settle(self._callback.step)
        if self.root_device.type == "xla":
            batch = self._backend.to_device(batch)
        return super().batch_to_device(batch, device, dataloader_idx)  # type: ignore[misc]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # A hook may have added parameters.
        self._gradients.watch(self.lightning_module.parameters())
        self._gradients.forward_begins(self._callback.step)
        output = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if output is None and self.world_size > 1 and self.lightning_module.automatic_optimization:
            raise missing_loss_error()
        weight = output.get("loss_weight") if isinstance(output, Mapping) else None
        if weight is not None and not isinstance(weight, Tensor):
            raise UserCodeError(f'training_step: "loss_weight" must be a tensor, got {type(weight).__name__}')
        if weight is not None:
            check_weight(weight, 'training_step: "loss_weight"')
        self._weight = weight
        return output

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        manual = not self.lightning_module.automatic_optimization
        weight, loss = self._weight, closure_loss
        if weight is None or manual:
            weight = torch.full_like(loss.detach(), 1 if manual else 1 / self._hp.accumulation_steps)
        else:
            # Lightning has divided the loss by the passes; the exchange divides by the sum of the weights.
            loss, weight = loss * weight, weight / self._hp.accumulation_steps
        module, precision = self.lightning_module, self.precision_plugin
        precision.backward(precision.pre_backward(loss, module), module, optimizer, *args, **kwargs)
        self._gradients.add(closure_loss if self._weight is None or manual else loss, weight)
        if manual or not module.trainer.fit_loop._should_accumulate():
            # Lightning's own method has no place for this before the hooks after the backward pass.
            self._gradients.average(self._callback.step + 1)
        result: Tensor = precision.post_backward(closure_loss, module)
        return result

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        self._gradients.optimizer_steps(p for group in optimizer.param_groups for p in group["params"])
        self._rates.set(self._callback.step)
        return super().optimizer_step(optimizer, *args, **kwargs)  # type: ignore[misc]

    def process_dataloader(self, dataloader: object) -> object:
        return self._division.divide(dataloader, training=self.lightning_module.trainer.training)

    def on_train_end(self) -> None:
        self._callback.take_final_state(self.lightning_module.trainer)

    def on_validation_end(self) -> None:
        self._callback.end_validation(self.lightning_module.trainer)

    # Collectives.

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        value = tensor if isinstance(tensor, Tensor) else torch.tensor(tensor, device=self.root_device)
        name = str(reduce_op).rpartition(".")[2].lower()
        match name:
            case "mean" | "avg":
                return total(value, self._backend) / self._backend.terms
            case "sum":
                return total(value, self._backend)
            case "max":
                return table(value, self._backend).amax(dim=0)
            case "min":
                return table(value, self._backend).amin(dim=0)
        raise UserCodeError(f"values cannot be reduced over the replicas by {reduce_op}, only by mean, sum, max or min")

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if sync_grads:
            gathered: Tensor = DifferentiableTable.apply(tensor, self._backend)  # type: ignore[no-untyped-call]
            return gathered
        with torch.no_grad():
            return table(tensor, self._backend)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002 - Lightning's name
        decisions = [row[0] > 0 for row in self._backend.gather([float(decision)])]
        return sum(decisions) == len(decisions) if all else any(decisions)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Sends any object that can be pickled through the gang's store, which only its members reach (`gate`)."""
        store: Any = self._backend.store
        if store is None:
            return obj
        self._messages += 1
        name = f"lightning/{self._messages}"
        if self.global_rank == src:
            store.set(name, pickle.dumps(obj))
            return obj
        return pickle.loads(store.get(name))  # noqa: S301 - from a process of this gang

    def barrier(self, name: str | None = None) -> None:
        # Lightning has just set a handler that would start a collective. The trainer's handler only sets a flag.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)
        self._backend.barrier()

    # Checkpoints.

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if filepath == HERE:
            self.state = checkpoint
            if not self.lightning_module.automatic_optimization:
                checkpoint[_GRADIENTS] = self._gradients.unused(self.lightning_module)
        else:
            checkpoint[_RATES] = self._rates.state()
            super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        if checkpoint_path != HERE:
            return super().load_checkpoint(checkpoint_path, *args, **kwargs)  # type: ignore[misc]
        state, self.state = self.state, None
        self.kept_gradients = state.pop(_GRADIENTS, {})
        return state

    if TYPE_CHECKING:
        lightning_module: Any
        optimizers: list[Optimizer]
        lr_scheduler_configs: list[Any]
        precision_plugin: Any
        accelerator: Any


class GangAccelerator:
    """The backend's device, if Lightning has no accelerator class for it."""

    def setup_device(self, device: torch.device) -> None: ...

    def teardown(self) -> None: ...

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> Sequence[Any]:
        return [0]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "tpu_trainer"


class XlaAutocast:
    """`precision="bf16-mixed"` on XLA, for Lightning's Precision."""

    precision = "bf16-mixed"

    def forward_context(self) -> AbstractContextManager[Any]:
        return torch.autocast("xla", dtype=torch.bfloat16)


def _check_held(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raises UserCodeError if an optimizer holds a parameter that is not in the module."""
    known = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in known:
                    raise UserCodeError(
                        f"{type(optimizer).__name__} holds a parameter of shape {list(parameter.shape)} that is not in "
                        "the module: checkpoints would lack it, and each replica would train its own copy"
                    )
