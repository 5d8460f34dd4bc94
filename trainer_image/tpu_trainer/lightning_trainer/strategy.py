"""Lightning's Strategy for this gang: its processes exist already, and every exchange between them is the backend's.

The classes here are the methods of Lightning's own (`package.as_kind_of`).
"""

from __future__ import annotations

import importlib
import math
import pickle
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.data.loading import Share
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.gang.exchange import check_weight
from tpu_trainer.lightning.needs import without_loss
from tpu_trainer.lightning.validation import metrics_of
from tpu_trainer.lightning_trainer.callbacks import refuse_callbacks
from tpu_trainer.lightning_trainer.gather import Gathered, pieces, table, total
from tpu_trainer.lightning_trainer.gradients import Gradients
from tpu_trainer.lightning_trainer.loaders import Division
from tpu_trainer.lightning_trainer.rates import Rates
from tpu_trainer.task.task import Hyperparameters

if TYPE_CHECKING:
    from torch.optim import Optimizer

HERE = "the state of this run"
"""The path under which Lightning saves and finds the state that goes into this job's own checkpoints."""

_RATES = "tpu_trainer_rates"
"""What the rates' state is called in a file that the module or a callback saves, and may load in the same run."""


class GangStrategy:
    """A replica's part. `share`: this process among all; `step`: steps done; `at_end`: is called with the Trainer after
    all hooks of the training's end.

    `state`: what Lightning saved last under `HERE`, or will load from there; `kept_rates`: the rates' state with it.
    """

    strategy_name = "tpu_trainer"

    def __init__(
        self,
        backend: Backend,
        share: Share,
        gradients: Gradients,
        division: Division,
        hp: Hyperparameters,
        rates: Rates,
        step: Callable[[], int],
        at_end: Callable[[Any], None],
    ) -> None:
        super().__init__()
        self._backend, self._gradients, self._division = backend, gradients, division
        self._hp, self._rates, self._step, self._at_end = hp, rates, step, at_end
        self._placed = False
        self.world_size, self.global_rank, self.local_rank = share.world, share.rank, share.local_rank
        # As if every process were a node of one device: only their product is known to be right everywhere.
        self.num_nodes = share.world
        self.node_rank = share.rank
        self.state: Any = None
        self.kept_rates: list[Any] = []
        self._weight: Tensor | None = None
        self._messages = 0
        self._on_sigterm = signal.getsignal(signal.SIGTERM)

    # Where this replica is.

    @property
    def root_device(self) -> torch.device:
        return self._backend.device

    @property
    def is_distributed(self) -> bool:
        """Lightning's log asks whether there is anybody to reduce a value with."""
        return self._backend.terms > 1

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def model_to_device(self) -> None:
        """Places the model, with rank 0's weights in every replica. A validation after the training finds it there."""
        if not self._placed:
            self._backend.place(self.lightning_module)
        metrics: list[Any] = metrics_of(self.lightning_module) if self._placed else []
        for metric in metrics:
            # Lightning's end of a training takes what was logged to the host, the metrics themselves with it.
            metric.to(self.root_device)
        self._placed = True

    def setup_environment(self) -> None:
        super().setup_environment()  # type: ignore[misc]
        # Lightning's functions for "only in the first process" look for the rank there.
        rank_zero: Any = importlib.import_module("lightning_utilities.core.rank_zero")
        rank_zero.rank_zero_only.rank = self.global_rank
        # What has been agreed on after a step must not be changed by a callback that runs later.
        trainer = self.lightning_module.trainer
        # Here those of configure_callbacks are among them.
        refuse_callbacks(trainer.callbacks)
        trainer.callbacks.sort(key=lambda callback: getattr(callback, "gang_order", 0))
        for callback in trainer.checkpoint_callbacks:
            # Otherwise they would lie beside the logger's files, which belong to an attempt.
            if getattr(callback, "dirpath", "none") is None:
                callback.dirpath = f"{trainer.default_root_dir}/checkpoints"

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)  # type: ignore[misc]
        for metric in metrics_of(self.lightning_module):
            # torchmetrics' own collectives know the process group's device only, if there is a group at all.
            vars(metric).update(
                dist_sync_fn=lambda tensor, group=None: pieces(tensor, self._backend),
                distributed_available_fn=lambda: self._backend.terms > 1,
            )

    def setup_optimizers(self, trainer: Any) -> None:
        # Optimizers and schedulers ask how many epochs there are, which follows from the steps and the data.
        trainer.fit_loop.setup_data()
        epochs, batches = None, self._hp.train_steps * self._hp.accumulation_steps
        if 0 < trainer.num_training_batches < math.inf:
            # Lightning steps no scheduler after an epoch that the run ends inside of.
            epochs = batches // trainer.num_training_batches
            trainer.fit_loop.max_epochs = math.ceil(batches / trainer.num_training_batches)
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
        """The model stays where it is, and what the job still needs of it."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # What a step does.

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self.root_device.type == "xla":
            batch = self._backend.to_device(batch)
        return super().batch_to_device(batch, device, dataloader_idx)  # type: ignore[misc]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # Modules and parameters that a hook has added since.
        self._gradients.watch(self.lightning_module.parameters())
        self._gradients.forward_begins(self._step())
        output = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if output is None and self.world_size > 1 and self.lightning_module.automatic_optimization:
            raise without_loss(self.world_size)
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
            # Lightning has divided the loss by the passes; the exchange divides the sum by the weights' sum.
            loss, weight = loss * weight, weight / self._hp.accumulation_steps
        result: Tensor = super().backward(loss, optimizer, *args, **kwargs)  # type: ignore[misc]
        self._gradients.add(closure_loss if self._weight is None or manual else loss, weight)
        if manual:
            self._gradients.average(self._step() + 1)
        return result if loss is closure_loss else closure_loss.detach()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """The gradients are the gang's before hooks, clipping and the optimizer see them."""
        manual = not self.lightning_module.automatic_optimization

        def averaged() -> Any:
            result = closure()
            if not manual or self._gradients.pending:
                self._gradients.average(self._step() + 1)
            return result

        self._rates.set(self._step())
        return super().optimizer_step(optimizer, averaged, model, **kwargs)  # type: ignore[misc]

    def process_dataloader(self, dataloader: object) -> object:
        return self._division.of(dataloader, training=self.lightning_module.trainer.training)

    def on_train_end(self) -> None:
        """Ends the training: Lightning calls the strategy last, after callbacks and module."""
        self._at_end(self.lightning_module.trainer)

    # What replicas tell each other.

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
        raise UserCodeError(f"a value cannot be reduced over the replicas by {reduce_op}; mean, sum, max and min can")

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if sync_grads:
            gathered: Tensor = Gathered.apply(tensor, self._backend)  # type: ignore[no-untyped-call]
            return gathered
        with torch.no_grad():
            return table(tensor, self._backend)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002 - Lightning's name
        said = [row[0] > 0 for row in self._backend.gather([float(decision)])]
        return sum(said) == len(said) if all else any(said)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Through the gang's own store, which only its members reach (`gate`): the object may be anything that can be
        pickled."""
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
        # Lightning has just set a handler that would begin a collective inside it. The trainer's own only sets a flag.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)
        self._backend.barrier()

    # The run's state.

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if filepath == HERE:
            self.state = checkpoint
        else:
            checkpoint[_RATES] = self._rates.state()
            super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        if checkpoint_path != HERE:
            return super().load_checkpoint(checkpoint_path, *args, **kwargs)  # type: ignore[misc]
        state, self.state = self.state, None
        return state

    if TYPE_CHECKING:
        lightning_module: Any
        optimizers: list[Optimizer]
        lr_scheduler_configs: list[Any]
        precision_plugin: Any
        accelerator: Any


class GangAccelerator:
    """The device that the backend has found and opened, where Lightning has no class of its own for it."""

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
    """`precision="bf16-mixed"` on XLA; the methods of Lightning's Precision."""

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
                        "the module: no checkpoint would have it, and each replica would train its own"
                    )
