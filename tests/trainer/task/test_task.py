"""The border to the user's code: entrypoints, hyperparameters, optimizers, and what is said when they are wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import nn
from torch.utils.data import DataLoader

from tests.trainer import tasks
from tests.trainer.gang_processes import run_spec
from tpu_contract.run_spec import parse_run_spec
from tpu_trainer import Hyperparameters, Task
from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.contract.outcome import outcome_of
from tpu_trainer.data.batch_source import open_data, read_batches
from tpu_trainer.data.order import Order, Share
from tpu_trainer.loop.entrypoint import Loaded, load_entrypoint
from tpu_trainer.optim.device_optimizers import Adafactor, Lion
from tpu_trainer.optim.optimizers import build_optimizer, find_unused_by, find_unused_settings
from tpu_trainer.task.hooks import Hooks


def hyperparameters(**changes: Any) -> Hyperparameters:
    return Hyperparameters.of(parse_run_spec(run_spec(**changes)))


def recipe(**optimizer: str) -> Hyperparameters:
    return Hyperparameters.of(parse_run_spec(run_spec() | {"optimizer": {"learningRate": "0.1", **optimizer}}))


MODULE = """
import torch
from tpu_trainer import Task
number = 3
def nothing(hp): return None
def three(hp): return 1, 2, 3
def raises(hp): raise KeyError("labels.csv")
def exits(hp): raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("entrypoint", "complaint"),
    [
        ("absent_module:task", "absent_module; its directory"),
        ("usertask:missing", "exits, nothing, raises, three"),
        ("usertask:number", "must be a function or a class"),
        ("usertask:nothing", "returned a NoneType"),
        ("usertask:three", "a tuple of int, int, int"),
        ("usertask:raises", "usertask:raises: KeyError:"),
        ("usertask:exits", "usertask:exits: SystemExit: 3"),
        ("halftask:task", "ModuleNotFoundError: No"),
    ],
)
def test_a_wrong_entrypoint_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entrypoint: str, complaint: str
) -> None:
    (tmp_path / "usertask.py").write_text(MODULE)
    (tmp_path / "halftask.py").write_text("import absent_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserCodeError) as refusal:
        load_entrypoint(entrypoint, hyperparameters(), "BuiltIn", Share(0, 1))
    assert complaint in str(refusal.value)


def test_the_message_of_a_user_error_is_the_users_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raisingtask.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserCodeError) as refusal:
        load_entrypoint("raisingtask:raises", hyperparameters(), "BuiltIn", Share(0, 1))
    message = outcome_of(refusal.value).message
    assert message.splitlines()[-1] == "KeyError: 'labels.csv'"
    assert f'File "{tmp_path / "raisingtask.py"}", line 7, in raises' in message


def test_evaluation_without_metrics_is_refused(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(ValueError) as caught:
        Task(model=tasks.Network(), train=tasks.examples(), loss=tasks.loss, evaluation=tasks.examples())
    assert str(caught.value) == snapshot


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": None}, "a torch.nn.Module, got None"),
        ({"model": tasks.Network}, "a torch.nn.Module, got <class"),
        ({"loss": 5}, "`loss` must be a function of"),
        ({"loss": nn.CrossEntropyLoss()}, "CrossEntropyLoss compares outputs with targets"),
        ({"loss": nn.functional.nll_loss}, "nll_loss compares outputs with targets"),
        ({"optimizer": torch.optim.SGD(tasks.Network().parameters(), lr=0.1)}, "got a SGD: its rate would not be"),
        ({"train": DataLoader([1, 2])}, "`train` must be a dataset"),
        ({"evaluation": DataLoader([1, 2])}, "`evaluation` must be a"),
        ({"workers": -1}, "`workers` must be 0 or more"),
    ],
)
def test_a_part_of_another_kind_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        Task(**{"model": tasks.Network(), "train": tasks.examples(), "loss": tasks.loss, **changes})
    assert said in str(caught.value)


def test_a_plain_task_has_hooks_that_do_nothing() -> None:
    loaded = load_entrypoint("tests.trainer.tasks:small", hyperparameters(), "BuiltIn", Share(0, 1))
    assert isinstance(loaded, Loaded)
    assert isinstance(loaded.task, Task)
    assert type(loaded.hooks) is Hooks


def test_a_dataset_shorter_than_a_global_batch_is_refused(snapshot: SnapshotAssertion) -> None:
    task = tasks.small(hyperparameters())
    with pytest.raises(UserCodeError) as caught:
        next(read_batches(task, open_data(task, Order(128, 0, Share(0, 1))), 0))
    assert "72 examples" in str(caught.value)
    assert "128" in str(caught.value)
    assert str(caught.value) == snapshot


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}),
        ("adam", torch.optim.Adam, {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}),
        ("adamw", torch.optim.AdamW, {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}),
        ("AdamW", torch.optim.AdamW, {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}),
        ("rmsprop", torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.0, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0}),
        ("lion", Lion, {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0}),
        ("adafactor", Adafactor, {"lr": 0.1, "weight_decay": 0.0}),
    ],
)
def test_a_named_optimizer_has_its_usual_defaults_for_what_the_recipe_leaves_out(
    name: str, kind: type, expected: dict[str, Any]
) -> None:
    hp = recipe(name=name)
    optimizer = build_optimizer(tasks.small(hp), hp)
    assert type(optimizer) is kind
    assert {key: optimizer.defaults[key] for key in expected} == expected


def test_a_named_optimizer_takes_the_recipes_values() -> None:
    hp = recipe(name="adamw", weightDecay="0.2", beta1="0.8", beta2="0.9", epsilon="1e-6")
    defaults = build_optimizer(tasks.small(hp), hp).defaults
    assert (defaults["weight_decay"], defaults["betas"], defaults["eps"]) == (0.2, (0.8, 0.9), 1e-6)
    hp = recipe(name="rmsprop", beta2="0.9")
    assert build_optimizer(tasks.small(hp), hp).defaults["alpha"] == 0.9


def test_an_unknown_optimizer_is_refused_with_the_known_names(snapshot: SnapshotAssertion) -> None:
    hp = recipe(name="lamb")
    with pytest.raises(UserCodeError) as caught:
        build_optimizer(tasks.small(hp), hp)
    assert str(caught.value) == snapshot


def test_what_is_no_optimizer_is_the_users_error(snapshot: SnapshotAssertion) -> None:
    hp = recipe(name="sgd")
    task = dataclasses.replace(tasks.small(hp), optimizer=lambda p, hp: None)
    with pytest.raises(UserCodeError) as caught:
        build_optimizer(task, hp)
    assert "torch.optim.Optimizer" in str(caught.value)
    assert str(caught.value) == snapshot


def test_a_tasks_own_optimizer_takes_precedence_over_the_recipes_name() -> None:
    hp = recipe(name="lamb")
    task = dataclasses.replace(tasks.small(hp), optimizer=lambda p, hp: torch.optim.Rprop(p, lr=hp.learning_rate))
    assert isinstance(build_optimizer(task, hp), torch.optim.Rprop)


def _groups(*rates: float, **group: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate, **group} for rate in rates], lr=rates[0]
    )


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (_groups(0.8), None),
        # A layer's own multiple of the recipe's rate.
        (_groups(0.08, 0.8), None),
        (_groups(0.8 * 0.75**3, 0.8 * 0.75**2, 0.8 * 0.75, 0.8), None),
        # A scheduler has begun already, from the recipe's rate.
        (_groups(0.032, initial_lr=0.032, max_lr=0.8), None),
        (_groups(0.0008, initial_lr=0.8), None),
        (_groups(0.1), "the optimizer was built with learning rate 0.1; the recipe's scaled rate is 0.8 and is not"),
        (_groups(0.1, 0.01), "the optimizer was built with learning rate 0.01 to 0.1 in 2 groups; the recipe's"),
        # OneCycleLR goes to its own maximum, whatever the optimizer was made with.
        (_groups(0.8, initial_lr=0.8, max_lr=0.1), "the scheduler was built with the maximum learning rate 0.1; the"),
    ],
)
def test_a_recipe_rate_that_no_group_has_is_reported(optimizer: torch.optim.Optimizer, said: str | None) -> None:
    hp = dataclasses.replace(recipe(name="sgd"), learning_rate=0.8)
    texts = list(find_unused_by(optimizer, hp))
    assert len(texts) == (said is not None)
    assert all(text.startswith(said or "") for text in texts)


@pytest.mark.parametrize(
    ("given", "built", "said"),
    [
        ({"weightDecay": "0.05"}, {"weight_decay": 0.05}, None),
        ({"weightDecay": "0.05"}, {"weight_decay": 0.0}, "the recipe's weightDecay 0.05 is not used"),
        ({"beta2": "0.95"}, {"betas": (0.9, 0.95)}, None),
        ({"beta1": "0.8", "beta2": "0.95"}, {}, "the recipe's beta1 0.8, beta2 0.95 are not used"),
        ({"epsilon": "1e-6"}, {}, "the recipe's epsilon 1e-06 is not used"),
        ({"momentum": "0.9"}, {}, "the recipe's momentum 0.9 is not used"),
        ({}, {"betas": (0.5, 0.6), "eps": 0.1}, None),
    ],
)
def test_values_that_a_tasks_own_optimizer_ignores_are_reported(
    given: dict[str, str], built: dict[str, Any], said: str | None
) -> None:
    hp = recipe(name="adamw", **given)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.1, **built)
    texts = list(find_unused_by(optimizer, hp))
    assert len(texts) == (said is not None)
    assert all(text.startswith(said or "") for text in texts)


@pytest.mark.parametrize(
    ("base", "name", "named", "another"),
    [
        (torch.optim.AdamW, "AdamW", "sgd", True),
        (torch.optim.AdamW, "AdamW", "adam", True),
        (torch.optim.AdamW, "AdamW", "AdamW", False),
        (torch.optim.Adadelta, "Adadelta", "adam", True),
        (torch.optim.Adadelta, "Adadelta", "adadelta", False),
        (torch.optim.SGD, "Clipped", "sgd", False),
        (torch.optim.SGD, "Clipped", "lion", True),
        (torch.optim.Optimizer, "FusedAdamW", "adamw", False),
        (torch.optim.Optimizer, "Lamb", "adamw", True),
        (torch.optim.Optimizer, "Lamb", "novograd", False),
    ],
)
def test_a_rate_scaled_for_another_optimizer_is_reported(base: Any, name: str, named: str, another: bool) -> None:
    built = type(name, (base,), {}) if base.__name__ != name else base
    defaults = {"defaults": {"lr": 0.1}} if base is torch.optim.Optimizer else {"lr": 0.1}
    texts = list(find_unused_by(built([torch.nn.Parameter(torch.zeros(1))], **defaults), recipe(name=named)))
    assert [text.partition(":")[0] for text in texts] == [
        f"the recipe's optimizer is {named} and the task built {name}"
    ] * another


def test_a_schedule_that_the_task_replaces_is_reported() -> None:
    hp = recipe(name="sgd")
    task = dataclasses.replace(tasks.small(hp), optimizer=lambda p, hp: torch.optim.SGD(p, lr=hp.learning_rate))
    scheduling = dataclasses.replace(task, scheduler=lambda optimizer, hp: None)
    (said,) = find_unused_settings(scheduling, Hooks(), build_optimizer(task, hp), hp)
    assert said.startswith("the task schedules the")
    assert "5 steps" in said
    assert list(find_unused_settings(task, Hooks(), build_optimizer(task, hp), hp)) == []


def test_an_evaluation_interval_without_evaluation_is_reported(snapshot: SnapshotAssertion) -> None:
    hp = hyperparameters(evaluateEverySteps=5)
    task = tasks.small(hp)
    (said,) = find_unused_settings(task, Hooks(), build_optimizer(task, hp), hp)
    assert said == snapshot
