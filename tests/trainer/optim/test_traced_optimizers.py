"""The recipe's optimizers on an XLA device go torch's way, step by step, and keep torch's state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainer.gang_processes import Launcher
from tpu_trainer.optim import traced_optimizers

SHAPES = [(), (7,), (3, 5)]
STEPS = 1000

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {}),
    "sgd with momentum": ("SGD", {"momentum": 0.9, "weight_decay": 0.01}),
    "sgd of nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "sgd with dampening, upwards": ("SGD", {"momentum": 0.8, "dampening": 0.3, "maximize": True}),
    "adam": ("Adam", {}),
    "adam without memory": ("Adam", {"betas": (0.0, 0.0), "eps": 0.1}),
    "adam with decay": ("Adam", {"weight_decay": 0.01, "betas": (0.8, 0.99)}),
    "adam of amsgrad": ("Adam", {"amsgrad": True, "maximize": True}),
    "adamw": ("AdamW", {"weight_decay": 0.1}),
    "adamw of amsgrad": ("AdamW", {"amsgrad": True, "eps": 1e-4}),
    "rmsprop": ("RMSprop", {}),
    "rmsprop with momentum": ("RMSprop", {"momentum": 0.5, "weight_decay": 0.01}),
    "rmsprop, centered": ("RMSprop", {"centered": True, "alpha": 0.9, "momentum": 0.3}),
}


class Run:
    """An optimizer with its weights; the second and the third have no gradient in some steps."""

    def __init__(self, kind: type, options: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
        self._generator, self._step = torch.Generator().manual_seed(5), 0
        self.weights = [nn.Parameter(self._draw(shape).to(dtype)) for shape in SHAPES]
        first, *others = self.weights
        self.optimizer = kind([{"params": [first], "lr": 0.01}, {"params": others}], lr=0.001, **options)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]

    def _draw(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def go(self, steps: int) -> Run:
        for _ in range(steps):
            self._step += 1
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * (1 - self._step / STEPS)
            used = [True, self._step > 3, self._step % 3 > 0]
            for weight, is_used in zip(self.weights, used, strict=True):
                gradient = self._draw(tuple(weight.shape)).to(weight.dtype)
                weight.grad = gradient if is_used else None
            self.optimizer.step()
        return self


def pair(case: str, dtype: torch.dtype = torch.float32) -> tuple[Run, Run]:
    """The trainer's run and torch's."""
    name, options = CASES[case]
    return Run(getattr(traced_optimizers, name), options, dtype), Run(getattr(torch.optim, name), options, dtype)


def assert_equal(ours: Run, theirs: Run, tolerance: float) -> None:
    for one, other in zip(ours.weights, theirs.weights, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        ours.optimizer.state_dict()["state"], theirs.optimizer.state_dict()["state"], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("case", ["sgd with momentum", "adam with decay", "adamw", "rmsprop with momentum"])
def test_a_thousand_steps_of_what_recipes_set_are_torchs_to_within_a_millionth(case: str) -> None:
    ours, theirs = pair(case)
    assert_equal(ours.go(STEPS), theirs.go(STEPS), 1e-6)


@pytest.mark.parametrize("case", CASES)
def test_every_option_is_torchs(case: str) -> None:
    ours, theirs = pair(case)
    assert_equal(ours.go(100), theirs.go(100), 1e-6)


@pytest.mark.parametrize("case", ["adam of amsgrad", "adamw", "rmsprop with momentum"])
def test_steps_that_the_device_counts_give_the_same(case: str) -> None:
    ours, theirs = pair(case)
    for group in ours.optimizer.param_groups:
        group["capturable"] = True
    assert_equal(ours.go(100), theirs.go(100), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_other_types_of_weights_go_torchs_way(dtype: torch.dtype) -> None:
    for case in ("sgd with momentum", "adamw", "rmsprop, centered"):
        ours, theirs = pair(case, dtype)
        assert_equal(ours.go(50), theirs.go(50), 1e-6)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_weights_of_several_types_may_be_in_one_group(kind: str) -> None:
    found = []
    for module in (traced_optimizers, torch.optim):
        weights = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
        optimizer = getattr(module, kind)(weights, lr=0.1, weight_decay=0.1)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.arange(3, dtype=weight.dtype)
            optimizer.step()
        found.append([weight.detach() for weight in weights])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("case", CASES)
def test_either_continues_with_the_others_state(case: str) -> None:
    name, options = CASES[case]
    ours, theirs = pair(case)
    for begun, kind in ((ours, getattr(torch.optim, name)), (theirs, getattr(traced_optimizers, name))):
        begun.go(20)
        kept = copy.deepcopy(begun.optimizer.state_dict())
        going_on = Run(kind, options).go(20)
        going_on.optimizer.load_state_dict(kept)
        with torch.no_grad():
            for weight, value in zip(going_on.weights, begun.weights, strict=True):
                weight.copy_(value)
        begun.go(20)
        going_on.go(20)
        ours_now, theirs_now = (begun, going_on) if begun is ours else (going_on, begun)
        assert_equal(ours_now, theirs_now, 1e-6)
        assert begun.optimizer.state_dict()["param_groups"] == going_on.optimizer.state_dict()["param_groups"]


@pytest.mark.parametrize("case", ["sgd with momentum", "adamw", "rmsprop"])
def test_16_bit_weights_are_updated_in_32_bits_and_rounded_once(case: str) -> None:
    rounded, _ = pair(case, torch.bfloat16)
    precise, _ = pair(case)
    with torch.no_grad():
        for wide, narrow in zip(precise.weights, rounded.weights, strict=True):
            wide.copy_(narrow)
    # Gradients that 16 bits hold exactly.
    for run in (rounded, precise):
        for weight in run.weights:
            weight.grad = torch.full_like(weight, 0.75)
        run.optimizer.step()
    for wide, narrow in zip(precise.weights, rounded.weights, strict=True):
        assert torch.equal(wide.bfloat16(), narrow)


def test_on_an_xla_device_the_recipes_optimizers_are_these_and_one_program(launcher: Launcher) -> None:
    printed = launcher.run_on_xla("tests.trainer.traced_on_xla").splitlines()
    said = "traced_optimizers, equal True, late programs 0"
    assert printed[-4:] == [f"{name}: {said}" for name in ("sgd", "adam", "adamw", "rmsprop")]


def test_parameters_share_numbers_until_their_counts_differ_and_never_again() -> None:
    optimizer = traced_optimizers.AdamW([nn.Parameter(torch.zeros(1))])
    assert optimizer._assign([1, 2, 3], [5, 5, 5]) == [0, 0, 0]
    apart = optimizer._assign([1, 2, 3], [6, 5, 6])
    assert apart[0] == apart[2] != apart[1]
    assert optimizer._assign([1, 2, 3], [7, 7, 7]) == apart
    assert len({*optimizer._assign([1, 2, 3], [8, 8, 9]), *apart}) == 3
