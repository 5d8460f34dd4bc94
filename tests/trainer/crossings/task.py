"""The task in which features meet: one small model whose parameters, buffers, hooks and optimizer the case chooses.

The reference trains the same model with the same hooks, which are the user's code; all else it does by itself.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.trainer.crossings.features import Case, case_of
from tpu_trainer import Hooks, Hyperparameters, Task
from tpu_trainer.optim.optimizers import BUILDERS

EXAMPLES, HELD_OUT, CLASSES = 304, 7, 3
INPUTS = WIDTH = 37
"""Of parameters that are divided among the replicas, with a remainder on 2 and on 3. They have one shape, in which one
may be taken for another."""

LATE = 4
"""The first step after a hook has changed what is trained."""

BAD = -1000.0
"""The first feature of an example that makes the loss infinite."""

WEIGHTS = (0.5, 2.0, 1.0)
DECAY, MOMENTUM = 0.01, 0.9

RATES = threading.local()
"""`seen`: by step, the rates of the groups in each update of this thread's newest run."""


class Model(nn.Module):
    """`turn`: which experts the next pass uses, where the case has them take turns."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.used = case.used
        self.middle = {"none": nn.Identity, "centre": Centre}.get(case.buffers, partial(nn.BatchNorm1d, WIDTH))()
        experts = 3 if case.used == "branches" else 2
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(experts))
        # One weight in two places, and a class that a buffer rules out: both are easily lost on the way to a device.
        self.stem, self.again = (nn.Linear(INPUTS, WIDTH, bias=False) for _ in range(2))
        self.again.weight = self.stem.weight
        self.head = nn.Linear(WIDTH, CLASSES + 1)
        self.register_buffer("mask", torch.tensor([0.0] * CLASSES + [-torch.inf]))
        self.spare = nn.Linear(WIDTH, WIDTH) if case.used == "spare" else None
        self.turn = 0
        if case.used == "idle":
            self.experts[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.middle(self.stem(x)))
        # Side by side, so that their gradients are computed alike.
        hidden = hidden + sum(torch.tanh(self.experts[place](hidden)) for place in self.places(x))
        hidden = hidden + torch.tanh(self.again(torch.tanh(x)))
        output: Tensor = self.head(hidden) + self.mask
        return output

    def places(self, x: Tensor) -> tuple[int, ...]:
        """Returns which experts a pass uses."""
        if self.used == "branches":
            return ((0, 1), (0, 2), (1, 2))[self.turn]
        if self.used == "idle":
            return (0, 1) if self.turn else (0,)
        if self.used == "data" and self.training:
            return (0,) if bool(x[0, 1] > 0) else (1,)
        return (0, 1)


class Centre(nn.Module):
    """Subtracts a running mean of what it has seen before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - self.mean
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.detach().mean(dim=0).to(self.mean.dtype), 0.3)
        return centred


class Changing(Hooks):
    """What the case's hooks do around the steps."""

    def __init__(self, case: Case, model: Model) -> None:
        self.case, self.model = case, model
        self.optimizer: torch.optim.Optimizer | None = None
        self.step = 0

    def step_begins(self, batch: Any, step: int) -> None:
        case, model, late, self.step = self.case, self.model, step >= LATE, step
        model.turn = step % 3 if case.used == "branches" else int(step >= LATE + 2)
        if case.used in ("late", "frozen", "idle"):
            model.experts[1].requires_grad_(late == (case.used != "frozen"))
        if case.buffers == "latenorm" and late:
            model.middle.eval()
        if case.groups == "added" and late and self.optimizer is not None and len(self.optimizer.param_groups) == 1:
            rate = self.optimizer.defaults["lr"]
            self.optimizer.add_param_group({"params": list(model.head.parameters()), "lr": rate / 2})

    def state(self) -> dict[str, Any]:
        return {"turn": self.model.turn}

    def load(self, state: Mapping[str, Any]) -> None:
        self.model.turn = state["turn"]

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        RATES.seen[self.step] = [float(group["lr"]) for group in optimizer.param_groups]
        if self.case.hook == "scaling":
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(3.0)

    @torch.no_grad()
    def after_step(self, batch: Any, loss: Tensor, step: int) -> None:
        if self.case.hook == "pruning":
            for weight in (self.model.experts[0].weight, self.model.head.weight):
                weight.copy_(weight.clamp(-0.1, 0.1))


def groups(case: Case, model: Model, rate: float) -> list[dict[str, Any]]:
    """Returns the parameter groups that the optimizer is built with."""
    if case.groups == "two":
        first = list(model.stem.parameters())
        rest = [parameter for parameter in model.parameters() if all(parameter is not one for one in first)]
        return [{"params": first, "lr": rate / 10, "weight_decay": 0.0}, {"params": rest}]
    if case.groups == "added":
        head = list(model.head.parameters())
        return [{"params": [each for each in model.parameters() if all(each is not one for one in head)]}]
    return [{"params": list(model.parameters())}]


def data() -> TensorDataset:
    """Returns the training examples, none of which is broken."""
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(EXAMPLES, INPUTS, generator=generator)
    return TensorDataset(features, torch.randint(0, CLASSES, (EXAMPLES,), generator=generator))


def held_out() -> TensorDataset:
    """Returns the examples of the evaluations."""
    return TensorDataset(*(tensor[:HELD_OUT] for tensor in data().tensors))


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the loss of each example."""
    features, labels = batch
    return nn.functional.cross_entropy(model(features), labels, reduction="none")


def loss(case: Case, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
    """Returns what the task's loss returns for a batch."""
    features, labels = batch
    each = losses(model, batch)
    if case.broken != "finite":
        each = each * torch.where((features[:, 0] == BAD).any(), torch.inf, 1.0)
    if case.loss == "mean":
        return each.mean()
    weights = torch.tensor(WEIGHTS, device=labels.device)[labels]
    return (each * weights).sum(), weights.sum()


OWN = {"adagrad": torch.optim.Adagrad, "nadam": torch.optim.NAdam}
"""Those that no recipe names."""


def task(hp: Hyperparameters) -> Task:
    """Returns the task of the case whose values are in `parameters.case`; one of its examples is broken if it says
    so, `parameters.broken`."""
    case = case_of(json.loads(hp.parameters["case"]))
    RATES.seen = {}
    model = Model(case)
    hooks = Changing(case, model)
    examples = data()
    if case.broken != "finite":
        examples.tensors[0][int(hp.parameters["broken"]), 0] = BAD

    def build(parameters: Iterable[nn.Parameter], hp: Hyperparameters) -> torch.optim.Optimizer:
        made, options = OWN.get(hp.optimizer), {"lr": hp.learning_rate, "weight_decay": DECAY}
        if made is None:
            made = BUILDERS[hp.optimizer]
        if hp.optimizer == "sgd":
            options["momentum"] = MOMENTUM
        hooks.optimizer = made(groups(case, model, hp.learning_rate), **options)
        return hooks.optimizer

    named = case.groups == "one" and case.used != "idle" and case.optimizer not in OWN
    evaluated: dict[str, Any] = {}
    if case.evaluation == "evaluated":
        evaluated = {"evaluation": held_out(), "metrics": lambda model, batch: {"miss": losses(model, batch)}}
    scheduler: Callable[..., Any] | None = None
    if case.schedule == "Own":
        scheduler = own_schedule
    return Task(
        model=model,
        train=examples,
        loss=partial(loss, case),
        optimizer=None if named else build,
        hooks=hooks,
        scheduler=scheduler,
        **evaluated,
    )


def own_schedule(optimizer: torch.optim.Optimizer, hp: Any) -> Any:
    """Returns a scheduler of torch that the task brings."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
