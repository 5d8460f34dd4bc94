"""What goes into a checkpoint comes out equal to the bit, and training on does not change what was taken."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion
from torch import nn

from tests.trainer.checkpoint.runs import assert_same
from tpu_trainer.checkpoint.snapshot import (
    STORABLE,
    LiveState,
    Snapshot,
    fingerprint,
    hooks_state,
    parse_snapshot,
    put_together,
    restore_model,
    restore_optimizer,
    snapshot_files,
    take_apart,
    take_snapshot,
)
from tpu_trainer.contract.errors import UserCodeError


class Tied(nn.Module):
    """Two layers with one weight, a buffer of every kind that is apt to be lost, a parameter that is not trained."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, dtype=dtype)
        self.second = nn.Linear(4, 4, bias=False, dtype=dtype)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4, dtype=dtype)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("count", torch.tensor(2**40 + 1))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.frozen = nn.Parameter(torch.ones((), dtype=dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(torch.tanh(self.first(x)))) * self.frozen


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)


Optimizers = Callable[[Any], torch.optim.Optimizer]


def started(
    optimizer: Optimizers, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied(dtype)
    return model, optimizer([p for p in model.parameters() if p.requires_grad])


def train(model: Tied, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(8, 4, generator=random).to(model.frozen.dtype)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)


def take(model: nn.Module, optimizer: torch.optim.Optimizer, **hooks: Any) -> Snapshot:
    return take_snapshot(LiveState(model, optimizer), hooks, 3, 48, {"position": 48, "loss": float("inf")})


def through_files(snapshot: Snapshot) -> Snapshot:
    files = dict(snapshot_files(snapshot))
    return parse_snapshot(files, files.__getitem__)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", [sgd, momentum, adamw, lbfgs])
def test_a_restored_run_continues_to_the_same_bits_as_one_that_never_stopped(
    optimizer: Optimizers, dtype: torch.dtype
) -> None:
    model, running = started(optimizer, dtype)
    train(model, running, steps=3, seed=1)
    snapshot = through_files(take(model, running))
    other, fresh = started(optimizer, dtype, seed=99)
    restore_model(snapshot, other)
    restore_optimizer(snapshot, fresh)
    for each, its_optimizer in ((model, running), (other, fresh)):
        train(each, its_optimizer, steps=3, seed=2)
    assert_same(take(other, fresh), take(model, running))
    assert other.second.weight is other.first.weight


def test_further_training_does_not_change_a_snapshot() -> None:
    model, optimizer = started(adamw)
    train(model, optimizer, steps=2, seed=1)
    ema = torch.zeros(3)
    snapshot = take(model, optimizer, ema=ema)
    before = copy.deepcopy(snapshot)
    train(model, optimizer, steps=2, seed=2)
    ema += 1
    assert_same(snapshot, before)


def test_a_run_that_continues_from_a_snapshot_does_not_change_it() -> None:
    model, optimizer = started(adamw)
    train(model, optimizer, steps=2, seed=1)
    snapshot = take(model, optimizer)
    before = copy.deepcopy(snapshot)
    restore_model(snapshot, model)
    restore_optimizer(snapshot, optimizer)
    train(model, optimizer, steps=2, seed=2)
    assert_same(snapshot, before)


def test_a_weight_used_twice_is_kept_once() -> None:
    model, optimizer = started(sgd)
    kept = take(model, optimizer).tensors["model"]
    assert "first.weight" in kept
    assert "second.weight" not in kept
    assert "scratch" not in kept


def test_rates_are_those_of_the_new_recipe_and_not_the_checkpoints() -> None:
    model, optimizer = started(momentum)
    train(model, optimizer, steps=1, seed=1)
    snapshot = take(model, optimizer)
    fresh = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.4, momentum=0.95)
    restore_optimizer(snapshot, fresh)
    assert (fresh.param_groups[0]["lr"], fresh.param_groups[0]["momentum"]) == (0.4, 0.95)


def test_parameter_groups_held_before_a_restore_still_set_the_rates_after() -> None:
    model, optimizer = started(momentum)
    train(model, optimizer, steps=1, seed=1)
    snapshot = take(model, optimizer)
    groups = optimizer.param_groups
    restore_optimizer(snapshot, optimizer)
    groups[0]["lr"] = 0.0
    before = take(model, optimizer).tensors["model"]["first.weight"]
    train(model, optimizer, steps=1, seed=2)
    assert model.first.weight.equal(before)


def test_step_counts_stay_on_the_host_and_moments_keep_their_type() -> None:
    model, optimizer = started(adamw, torch.bfloat16)
    train(model, optimizer, steps=1, seed=1)
    for state in optimizer.state.values():
        # As optimizers do that keep exact moments beside weights of few bits.
        state["exp_avg"] = state["exp_avg"].float() + 1e-6
    snapshot = take(model, optimizer)
    other, fresh = started(adamw, torch.bfloat16)
    restore_optimizer(snapshot, fresh)
    assert_same(take(model, fresh), snapshot)
    assert all(state["step"].device.type == "cpu" for state in fresh.state.values())
    del other


@pytest.mark.parametrize("dtype", sorted(STORABLE, key=str), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)], ids=str)
def test_every_type_and_shape_survives_the_files(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    elements = torch.Size(shape).numel()
    random = torch.randint(0, 256, (elements * dtype.itemsize,), dtype=torch.uint8)
    bits = random % 2 if dtype is torch.bool else random
    model = nn.Module()
    model.register_buffer("x", bits.view(dtype).reshape(shape) if elements else torch.empty(shape, dtype=dtype))
    snapshot = take(model, sgd([torch.zeros(1)]))
    assert_same(through_files(snapshot), snapshot)


def test_views_and_strides_do_not_matter() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    model = nn.Module()
    for name, view in (("turned", whole.T), ("row", whole[1]), ("same", whole[1]), ("wide", whole[:, :1].expand(3, 5))):
        model.register_buffer(name, view)
    kept = through_files(take(model, sgd([torch.zeros(1)]))).tensors["model"]
    assert all(kept[name].equal(buffer) for name, buffer in model.named_buffers(remove_duplicate=False))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: setattr(m, "first", nn.Linear(4, 5)), "first.bias is float32 [4] in the checkpoint and float32 [5]"),
        (lambda m: m.double(), "first.bias is float32 [4] in the checkpoint and float64 [4] in the model"),
        (lambda m: setattr(m, "more", nn.Linear(1, 1)), "more.bias is nothing in the checkpoint and float32 [1] in"),
        (lambda m: delattr(m, "norm"), "norm.bias is float32 [4] in the checkpoint and nothing in the model"),
        (
            lambda m: setattr(m.second, "weight", nn.Parameter(torch.ones(4, 4))),
            "second.weight is nothing in the checkpoint and float32 [4, 4] in the model",
        ),
    ],
    ids=["shape", "type", "more", "fewer", "no longer shared"],
)
def test_another_model_is_refused_with_its_first_difference(change: Callable[[nn.Module], object], said: str) -> None:
    model, optimizer = started(sgd)
    snapshot, before = take(model, optimizer), fingerprint(model, "m:f", 3)
    change(model)
    with pytest.raises(UserCodeError) as raised:
        restore_model(snapshot, model)
    assert str(raised.value).partition("model: ")[2].startswith(said)
    assert fingerprint(model, "m:f", 3) != before


def test_a_fingerprint_covers_names_types_shapes_entrypoint_and_seed_but_not_values() -> None:
    model, _ = started(sgd)
    same, _ = started(sgd, seed=7)
    assert fingerprint(model, "m:f", 3) == fingerprint(same, "m:f", 3)
    assert len({fingerprint(model, entry, seed) for entry in ("m:f", "m:g") for seed in (3, 4)}) == 4


def test_the_state_of_another_optimizer_is_refused() -> None:
    model, optimizer = started(momentum)
    snapshot = take(model, optimizer)
    with pytest.raises(UserCodeError, match=r"class SGD .*, AdamW "):
        restore_optimizer(snapshot, adamw(list(model.parameters())))
    with pytest.raises(UserCodeError, match=r"parameters \[\[4, 4\], "):
        restore_optimizer(snapshot, momentum(list(model.parameters())))


def test_the_state_of_hooks_comes_back_as_it_was() -> None:
    model, optimizer = started(sgd)
    state = {"best": float("-inf"), "ema": {"w": torch.ones(2, dtype=torch.float64)}, "seen": [1, None, "a", True]}
    back = hooks_state(through_files(take(model, optimizer, **state)))
    assert back["ema"]["w"].equal(torch.ones(2, dtype=torch.float64))
    assert {**back, "ema": None} == {**state, "ema": None}


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a": [0, {"b": {1, 2}}]}, "at /a/1/b: JSON values"),
        ({"a": {3: 0}}, "at /a: keys must be text"),
        ({"a": {"$tensor": 0}}, "at /a: keys must be text"),
        ({"a/b": nn.Linear(1, 1)}, "at /a~1b: JSON values"),
    ],
)
def test_what_a_checkpoint_cannot_keep_is_named_with_its_place(state: dict[str, Any], said: str) -> None:
    with pytest.raises(UserCodeError) as raised:
        take(nn.Linear(1, 1), sgd([torch.zeros(1)]), **state)
    assert str(raised.value).partition("hooks: ")[2].startswith(said)


def test_a_tensor_that_safetensors_cannot_hold_is_refused_when_it_is_taken(snapshot: SnapshotAssertion) -> None:
    model = nn.Module()
    model.register_buffer("x", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(UserCodeError) as caught:
        take(model, sgd([torch.zeros(1)]))
    assert str(caught.value) == snapshot


def test_extra_state_of_a_module_that_is_not_a_tensor_is_refused(snapshot: SnapshotAssertion) -> None:
    class Extra(nn.Module):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

    with pytest.raises(UserCodeError) as caught:
        take(Extra(), sgd([torch.zeros(1)]))
    assert str(caught.value) == snapshot


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.just(torch.ones(1))
keys = st.text(max_size=3).filter(lambda key: key != "$tensor") | st.sampled_from(["a/b", "a", "b", "~1", ""])
trees = st.recursive(leaves, lambda t: st.lists(t, max_size=3) | st.dictionaries(keys, t, max_size=3), max_leaves=12)


@given(tree=trees)
def test_any_tree_is_put_together_as_it_was_taken_apart(tree: Any) -> None:
    numbered: list[torch.Tensor] = []

    def number(value: Any) -> Any:
        """A tensor of its own in each place, so that two that are exchanged do not look alike."""
        if isinstance(value, torch.Tensor):
            numbered.append(torch.tensor(len(numbered)))
            return numbered[-1]
        if isinstance(value, list):
            return [number(item) for item in value]
        return {key: number(item) for key, item in value.items()} if isinstance(value, dict) else value

    given_tree = number(tree)
    value, tensors = take_apart(given_tree, "it")
    assert len(tensors) == len(numbered)
    # Tensors compare by identity here: `==` of dicts and lists asks `is` first.
    assert put_together(value, tensors) == given_tree
