"""Hyperparameters reach an entrypoint by the names of its parameters, and a misspelt name is not passed over."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import Enum
from pathlib import PurePosixPath
from typing import Any, Literal, Optional

import pytest

from tests.trainer.gang_processes import run_spec
from tpu_contract.run_spec import parse_run_spec
from tpu_trainer import Hyperparameters
from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.loop.entrypoint import arguments


def recipe(parameters: dict[str, str] | None = None, **optimizer: str) -> Hyperparameters:
    spec = run_spec(parameters=parameters or {}) | {"optimizer": {"name": "sgd", "learningRate": "0.5", **optimizer}}
    return Hyperparameters.of(parse_run_spec(spec))


def called(function: Callable[..., Any], hp: Hyperparameters) -> Any:
    positional, keywords = arguments(function, hp, "module:task")
    return function(*positional, **keywords)


class Model:
    def __init__(self, width: int, lr: float = 9.0, **rest: Any) -> None:
        self.given = (width, lr, rest)


def forward_reference(config: "Hyperparameters") -> Any:  # noqa: UP037 - as older code writes it
    return config


@pytest.mark.parametrize("function", [lambda hp: hp, lambda hyperparameters: hyperparameters, lambda x: x])
def test_a_parameter_called_hp_or_an_only_parameter_gets_the_object(function: Callable[..., Any]) -> None:
    hp = recipe({"anything": "goes"})
    assert called(function, hp) is hp


def test_a_parameter_annotated_hyperparameters_gets_the_object() -> None:
    hp = recipe()
    assert called(forward_reference, hp) is hp


def takes_both(width: int, hp: Hyperparameters, depth: int = 2) -> Any:
    return width, hp.learning_rate, depth


def test_the_object_and_names_go_together() -> None:
    assert called(takes_both, recipe({"width": "8", "of_no_parameter": "1"})) == (8, 0.5, 2)


def test_hyperparameters_have_their_own_names_and_lr_is_one_of_them() -> None:
    def task(learning_rate: float, train_steps: int, global_batch_size: int, seed: int, lr: float) -> Any:
        return learning_rate, train_steps, global_batch_size, seed, lr

    assert called(task, recipe()) == (0.5, 24, 16, 3, 0.5)


def test_a_recipe_parameter_takes_precedence_over_the_hyperparameter_of_its_name() -> None:
    assert called(lambda *, weight_decay: weight_decay, recipe({"weight_decay": "x"}, weightDecay="0.1")) == "x"


def test_a_parameters_default_stands_if_the_recipe_leaves_it_out() -> None:
    def task(momentum: float = 0.7, weight_decay: float = 0.2, lr: float = 9.0, width: int = 4) -> Any:
        return momentum, weight_decay, lr, width

    assert called(task, recipe(weightDecay="0.1")) == (0.7, 0.1, 0.5, 4)


def test_a_required_parameter_gets_torchs_default_if_the_recipe_leaves_it_out() -> None:
    assert called(lambda beta1, momentum: (beta1, momentum), recipe()) == (0.9, 0.0)


def test_a_class_is_called_by_its_constructors_names_and_kwargs_get_the_rest() -> None:
    assert called(Model, recipe({"width": "3", "depth": "2"})).given == (3, 0.5, {"depth": 2})


class Size(Enum):
    SMALL, LARGE = "s", "l"


def test_positional_only_parameters_are_filled_in_order() -> None:
    def task(a: int, b: int = 2, /, c: int = 3) -> Any:
        return a, b, c

    assert called(task, recipe({"a": "1", "c": "5"})) == (1, 2, 5)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (int, "7", 7),
        (int, "1e3", 1000),
        (int, "-12345678901234567891", -12345678901234567891),
        (float, "1e-3", 1e-3),
        (bool, "False", False),
        (bool, "yes", True),
        (str, "12", "12"),
        (Any, "12", "12"),
        (int | None, "7", 7),
        (Literal["small", "large"], "large", "large"),
        (Literal[18, 50] | None, "50", 50),
        (Size, "LARGE", Size.LARGE),
        (Size, "l", Size.LARGE),
        (PurePosixPath, "/data/train", PurePosixPath("/data/train")),
        (Optional[float], "7", 7.0),  # noqa: UP045 - as older code writes it
    ],
)
def test_a_text_is_converted_to_the_annotated_type(kind: Any, text: str, value: Any) -> None:
    def task(x: Any) -> Any:
        return x

    task.__annotations__["x"] = kind
    found = called(task, recipe({"x": text}))
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(("default", "value"), [(1, 8), (1.0, 8.0), ("a", "8"), (None, 8)])
def test_without_annotation_a_text_is_converted_to_the_defaults_type(default: Any, value: Any) -> None:
    found = called(lambda x=default: x, recipe({"x": "8"}))
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("32", 32),
        ("-3", -3),
        ("0.5", 0.5),
        ("1e-3", 1e-3),
        ("true", True),
        ("False", "False"),
        ("007", "007"),
        ("1_000", "1_000"),
        ("nan", "nan"),
        ("resnet50", "resnet50"),
        ("", ""),
    ],
)
def test_without_annotation_and_default_a_text_is_read_as_json(text: str, value: Any) -> None:
    found = called(lambda width, x: x, recipe({"width": "1", "x": text}))
    assert (found, type(found)) == (value, type(value))


def of_a_list(sizes: list[int]) -> None: ...


def of_a_size(size: Size) -> None: ...


def of_an_int(width: int, depth: int = 1) -> None: ...


def of_a_bool(fast: bool) -> None: ...


@pytest.mark.parametrize(
    ("function", "parameters", "complaint"),
    [
        (
            of_an_int,
            {"widht": "8"},
            "recipe.parameters has widht",
        ),
        (
            of_an_int,
            {"width": "8", "dpeth": "2"},
            "recipe.parameters has dpeth",
        ),
        (of_an_int, {"width": "wide"}, "recipe.parameters.width:"),
        (of_an_int, {"width": "2.5"}, "recipe.parameters.width:"),
        (of_an_int, {"width": "inf"}, "recipe.parameters.width:"),
        (of_a_bool, {"fast": "maybe"}, "recipe.parameters.fast:"),
        (of_a_size, {"size": "XL"}, "recipe.parameters.size:"),
        (of_a_list, {"sizes": "1,2"}, "recipe.parameters.sizes: a"),
        (lambda: None, {"width": "8"}, "recipe.parameters has width"),
    ],
)
def test_arguments_that_do_not_fit_are_named(
    function: Callable[..., Any], parameters: dict[str, str], complaint: str
) -> None:
    with pytest.raises(UserCodeError) as refusal:
        called(function, recipe(parameters))
    assert complaint in str(refusal.value)
    assert "entrypoint module:task" in str(refusal.value)


def test_exactly_the_values_left_out_of_the_recipe_are_silent() -> None:
    optional = {"momentum", "weight_decay", "beta1", "beta2", "epsilon"}
    assert optional <= recipe().silent
    given = recipe(momentum="0.9", weightDecay="0.1", beta1="0.8", beta2="0.9", epsilon="1e-6")
    assert not optional & given.silent
    assert {field.name for field in dataclasses.fields(given)} >= given.silent
