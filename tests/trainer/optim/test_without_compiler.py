"""A run that compiles nothing does not import torch.compile's compiler, and its optimizer steps as torch's own does."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from tests.trainer.gang_processes import ROOT
from tpu_trainer.optim.without_compiler import spare_step

RUNS = """
import sys
from dataclasses import replace
from tempfile import TemporaryDirectory
from torch import optim
from tests.trainer import tasks
from tests.trainer.whole_runs import run

def own(hp, rank):
    return replace(tasks.small(hp), optimizer=lambda parameters, hp: optim.Adam(parameters, lr=hp.learning_rate))

for changes in ({}, {"onNotFinite": "Skip", "emaDecay": "0.9"}, {"sharding": "Optimizer"}):
    for made in (lambda hp, rank: tasks.small(hp), own):
        with TemporaryDirectory() as folder:
            ran = run(made, 2, trainSteps=3, checkpoint={"uri": folder, "keep": 1}, **changes)
        assert ran.outcome.ended_well, ran.outcome
assert "torch._dynamo" not in sys.modules
"""


def test_a_run_that_compiles_nothing_does_not_import_the_compiler() -> None:
    subprocess.run([sys.executable, "-c", RUNS], cwd=ROOT, check=True)


class Overriding(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        return super().step(closure)


class Wrapped(torch.optim.SGD):
    """Its step is torch's in a wrapper that counts."""

    @functools.wraps(torch.optim.SGD.step)
    def step(self, closure: Any = None) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        return super().step(closure)


KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "inherited": type("Named", (torch.optim.Adam,), {}),
    "overriding": lambda parameters: Overriding(parameters, lr=0.1),
    "wrapped": lambda parameters: Wrapped(parameters, lr=0.1),
    "differentiable": lambda parameters: torch.optim.Adam(parameters, differentiable=True),
}


def trained(kind: str, prepare: Callable[[torch.optim.Optimizer], None]) -> tuple[list[Tensor], list[str]]:
    """The weights after five steps, and what its hooks and its closure have noted."""
    torch.manual_seed(3)
    model = nn.Linear(4, 2)
    leaves = [*model.parameters()]
    optimizer, noted = KINDS[kind](leaves), list[str]()
    prepare(optimizer)
    optimizer.register_step_pre_hook(lambda *_: noted.append("before"))
    optimizer.register_step_post_hook(lambda *_: noted.append("after"))
    schedule = ExponentialLR(optimizer, 0.5)

    def closure() -> Tensor:
        noted.append(f"gradients {torch.is_grad_enabled()}")
        return sum((leaf.square().sum() for leaf in leaves), start=torch.zeros(()))

    for _ in range(5):
        for leaf in leaves:
            leaf.grad = 2 * leaf.detach()
        optimizer.step(closure)
        schedule.step()
    return [leaf.detach() for leaf in leaves], noted


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "differentiable"])
def test_the_step_is_torchs_own_to_the_last_bit(kind: str) -> None:
    (weights, noted), (there, seen) = trained(kind, spare_step), trained(kind, lambda _: None)
    assert noted == seen
    assert all(torch.equal(ours, torchs) for ours, torchs in zip(weights, there, strict=True))
    assert "before" in noted
    assert "gradients True" in noted


OTHERS = ("overriding", "wrapped", "differentiable")


@pytest.mark.parametrize(("kind", "spared"), [(kind, kind not in OTHERS) for kind in KINDS])
def test_a_step_of_another_kind_is_left_alone(kind: str, spared: bool) -> None:
    optimizer = KINDS[kind]([torch.zeros(1, requires_grad=True)])
    spare_step(optimizer)
    assert ("step" in vars(optimizer)) == spared


def test_an_optimizer_of_a_library_may_be_any_object() -> None:
    class Minimal:
        __slots__ = ("param_groups",)

        def step(self) -> None: ...

    spare_step(Minimal())  # type: ignore[arg-type]


def test_a_step_that_a_task_has_put_in_its_place_is_left_alone() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    optimizer.step = own = lambda closure=None: None  # type: ignore[method-assign]
    spare_step(optimizer)
    assert optimizer.step is own
