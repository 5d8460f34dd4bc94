"""Every field of the recipe has a visible effect, from the job's YAML to the end of a training, or the plan says that
it has none. A field without a case here fails.
"""

import dataclasses
import math
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from torch import nn
from torch.utils.data import TensorDataset

from tests.contract.jobs import stored_job
from tests.trainer import tasks
from tests.trainer.in_process import Run, run
from tpu_contract.protocol import OPTIMIZERS
from tpu_trainer import Hyperparameters, Task
from tpu_trainer.optim.optimizers import BUILDERS
from tpu_training_operator.api.recipe import Recipe
from tpu_training_operator.domain.job.recipe.resolve import resolve
from tpu_training_operator.domain.objects.run_spec import run_spec

Changes = dict[str, Any]


ADAM = {"name": "adam", "learningRate": "0.01"}
SGD = {"name": "sgd", "learningRate": "0.3", "momentum": "0.9"}
ONE_CHIP = {"acceleratorType": "v5litepod-1"}
BROKEN = {"parameters": {"broken_step": "3"}}
KNOWN = ", ".join(sorted(OPTIMIZERS))
PLATEAU = {"name": "Plateau", "metric": "length", "mode": "Max", "patience": 1}
WATCHED = {"metric": "length", "mode": "Max"}
FOLLOWED = {"evaluateEverySteps": 2, "schedule": PLATEAU}
EPOCHS = {"trainSteps": ..., "epochs": 2, "datasetSize": tasks.EXAMPLES}


def task(hp: Hyperparameters, width: int = 1, broken_step: int = 0) -> Task:
    """Its metric is the length of its weights, which shows whether they are averaged. The loss of step `broken_step`,
    counted from 1, is NaN."""
    small, steps = tasks.small(hp), count(1)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        mean = small.loss(model, batch)
        return mean * math.nan if next(steps) == broken_step else mean

    def metrics(model: nn.Module, batch: tuple[torch.Tensor]) -> dict[str, torch.Tensor]:
        length = torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()
        return {"length": width * length.expand(len(batch[0]))}

    evaluation = TensorDataset(torch.arange(4))
    return dataclasses.replace(small, loss=loss, evaluation=evaluation, metrics=metrics)


def trained(directory: Path, changes: Changes) -> Run:
    """The run of a job on one CPU host with four chips, with these changes to its recipe."""
    recipe = {f"recipe.{path}": value for path, value in ({"globalBatchSize": 16, "trainSteps": 8} | changes).items()}
    job = stored_job(
        {
            "slice": {"acceleratorType": "v5litepod-4", "hardware": "CPU"},
            "trainer.backend": "Torch",
            "trainer.entrypoint": "tests.contract.test_recipe_fields:task",
            "recipe.optimizer": SGD,
            **recipe,
        }
    )
    return run(run_spec(job, resolve(job.spec), 1), directory)


SEEN: dict[str, tuple[Any, ...]] = {}


def seen(directory: Path, changes: Changes) -> tuple[Any, ...]:
    """What is visible of a run: its outcome, losses and evaluations. Results are cached."""
    key = repr(changes)
    if key not in SEEN:
        made = trained(directory, changes)
        SEEN[key] = made.outcome.code, made.losses, made.evaluations
    return SEEN[key]


# Per field: a recipe with it, and the same recipe without it or with another value; the two runs must differ.
ACT: dict[str, tuple[Changes, Changes]] = {
    "tunedOn": ({"tunedOn": ONE_CHIP}, {}),
    "globalBatchSize": ({"globalBatchSize": 32}, {}),
    "trainSteps": ({"trainSteps": 9}, {}),
    "epochs": (EPOCHS, EPOCHS | {"epochs": 3}),
    "datasetSize": (EPOCHS, EPOCHS | {"datasetSize": 2 * tasks.EXAMPLES}),
    "optimizer.name": ({"optimizer.name": "adam"}, {"optimizer.name": "rmsprop"}),
    "optimizer.learningRate": ({"optimizer.learningRate": "0.1"}, {}),
    "optimizer.momentum": ({"optimizer.momentum": "0.5"}, {}),
    "optimizer.weightDecay": ({"optimizer.weightDecay": "0.1"}, {}),
    "optimizer.beta1": ({"optimizer": ADAM | {"beta1": "0.5"}}, {"optimizer": ADAM}),
    "optimizer.beta2": ({"optimizer": ADAM | {"beta2": "0.5"}}, {"optimizer": ADAM}),
    "optimizer.epsilon": ({"optimizer": ADAM | {"epsilon": "0.1"}}, {"optimizer": ADAM}),
    "warmupSteps": ({"warmupSteps": 4}, {}),
    "warmupEpochs": (EPOCHS | {"warmupEpochs": 1}, EPOCHS),
    "schedule.name": ({"schedule": {"name": "Cosine"}}, {"schedule": {"name": "Linear"}}),
    "schedule.milestones": (
        {"schedule": {"name": "Step", "milestones": [3]}},
        {"schedule": {"name": "Step", "milestones": [5]}},
    ),
    "schedule.milestoneEpochs": (
        EPOCHS | {"schedule": {"name": "Step", "milestoneEpochs": [1]}},
        EPOCHS,
    ),
    "schedule.factor": ({"schedule": {"name": "Linear", "factor": "0.5"}}, {"schedule": {"name": "Linear"}}),
    "schedule.metric": (FOLLOWED, {**FOLLOWED, "schedule": PLATEAU | {"metric": "another"}}),
    "schedule.mode": (FOLLOWED, {**FOLLOWED, "schedule": PLATEAU | {"mode": "Min"}}),
    "schedule.patience": (FOLLOWED, {**FOLLOWED, "schedule": PLATEAU | {"patience": 3}}),
    "evaluateEverySteps": ({"evaluateEverySteps": 3}, {}),
    "evaluateEveryEpochs": (EPOCHS | {"evaluateEveryEpochs": 1}, EPOCHS),
    "stopEarly": (
        {"evaluateEverySteps": 2, "stopEarly": {"metric": "length", "mode": "Max", "patience": 1, "minDelta": "99"}},
        {"evaluateEverySteps": 2},
    ),
    "emaDecay": ({"emaDecay": "0.5"}, {}),
    "onNotFinite": (BROKEN | {"onNotFinite": "Skip"}, BROKEN),
    "gradientClipNorm": ({"gradientClipNorm": "0.1"}, {}),
    "precision": ({"precision": "BFloat16Mixed"}, {"precision": "BFloat16"}),
    "sharding": (
        {"optimizer": {"name": "adafactor", "learningRate": "0.01"}, "sharding": "Optimizer"},
        {"optimizer": {"name": "adafactor", "learningRate": "0.01"}},
    ),
    "gradientNoiseScale": ({"tunedOn": ONE_CHIP, "gradientNoiseScale": "8"}, {"tunedOn": ONE_CHIP}),
    "scaling.batch": ({"tunedOn": ONE_CHIP, "scaling": {"batch": "GlobalConstant"}}, {"tunedOn": ONE_CHIP}),
    "scaling.learningRate": ({"tunedOn": ONE_CHIP, "scaling": {"learningRate": "Unscaled"}}, {"tunedOn": ONE_CHIP}),
    "scaling.maxLearningRate": ({"tunedOn": ONE_CHIP, "scaling": {"maxLearningRate": "0.5"}}, {"tunedOn": ONE_CHIP}),
    "scaling.steps": (
        {"tunedOn": ONE_CHIP, "gradientNoiseScale": "8", "scaling": {"steps": "SameLoss"}},
        {"tunedOn": ONE_CHIP, "gradientNoiseScale": "8"},
    ),
    "scaling.betas": (
        {"tunedOn": ONE_CHIP, "optimizer": ADAM, "scaling": {"betas": True}},
        {"tunedOn": ONE_CHIP, "optimizer": ADAM},
    ),
    "scaling.weightDecay": (
        {"tunedOn": ONE_CHIP, "optimizer": ADAM | {"name": "adamw"}, "scaling": {"weightDecay": True}},
        {"tunedOn": ONE_CHIP, "optimizer": ADAM | {"name": "adamw"}},
    ),
    "scaling.ema": (
        {"tunedOn": ONE_CHIP, "emaDecay": "0.5", "scaling": {"ema": True}},
        {"tunedOn": ONE_CHIP, "emaDecay": "0.5"},
    ),
    "seed": ({"seed": 1}, {}),
    "parameters": ({"parameters": {"width": "2"}}, {}),
}


def leaves(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """The fields by path; a slice counts as one."""
    for name, field in model.model_fields.items():
        kind, below = field.annotation, f"{path}{field.alias or name}"
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from leaves(kind, f"{below}.")
        else:
            yield below


@pytest.mark.parametrize("field", list(leaves(Recipe)))
def test_every_field_of_the_recipe_has_an_effect(field: str, tmp_path: Path) -> None:
    one, other = (seen(tmp_path, changes) for changes in ACT[field])
    assert one != other


def test_runs_of_the_same_recipe_are_identical(tmp_path: Path) -> None:
    first = seen(tmp_path, {})
    SEEN.clear()
    assert seen(tmp_path, {}) == first


def test_the_trainer_builds_every_optimizer_that_the_plan_knows() -> None:
    assert BUILDERS.keys() == OPTIMIZERS.keys()


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(
    ("field", "setting", "value"),
    [
        ("momentum", "momentum", "0.5"),
        ("weight_decay", "weightDecay", "0.1"),
        ("beta1", "beta1", "0.5"),
        ("beta2", "beta2", "0.5"),
        ("epsilon", "epsilon", "0.1"),
    ],
)
def test_a_setting_has_an_effect_if_the_optimizer_takes_it_and_gets_a_warning_if_not(
    name: str, field: str, setting: str, value: str, tmp_path: Path
) -> None:
    without = {"optimizer": {"name": name, "learningRate": "0.01"}}
    given = {"optimizer": without["optimizer"] | {setting: value}}
    one, other = (seen(tmp_path, changes) for changes in (given, without))
    assert (one != other) == (field in OPTIMIZERS[name])
    job = stored_job({f"recipe.{path}": value for path, value in given.items()})
    said = f"recipe.optimizer.{setting} has no effect: {name} does not take it"
    assert (said in resolve(job.spec).warnings) == (field not in OPTIMIZERS[name])


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"optimizer.name": "AdamW"}, None),
        ({"optimizer.name": "lamb"}, f"the trainer builds {KNOWN}, but not lamb; unless"),
        ({"optimizer.name": "Lion"}, None),
        ({"optimizer.name": "adma"}, f"the trainer builds {KNOWN}, but not adma (did"),
        ({"optimizer.name": "smurf"}, f"the trainer builds {KNOWN}, but not smurf; un"),
        ({"scaling": {"betas": True}}, "recipe.scaling.betas has no effect: sgd does not take betas"),
        ({"scaling": {"weightDecay": True}}, "recipe.scaling.weightDecay has no effect: recipe.optimizer"),
        ({"scaling": {"ema": True}}, "recipe.scaling.ema has no effect: recipe.emaDecay is not set"),
        ({"schedule": {"factor": "0.5"}}, "recipe.schedule.factor has no effect: schedule Constant keeps the learning"),
        ({"schedule": {"name": "Step", "milestones": [100, 300]}}, "milestones 300 are not reached: the training ends"),
        ({"emaDecay": "0.9999"}, "emaDecay 0.9999 averages over more than the 300 steps of the training"),
        ({"emaDecay": "0.99"}, None),
        ({"evaluateEverySteps": 300}, None),
        ({"evaluateEverySteps": 301}, "recipe.evaluateEverySteps has no effect: the first evaluation would be after"),
        ({"evaluateEverySteps": 60, "stopEarly": {**WATCHED, "patience": 4}}, None),
        ({"evaluateEverySteps": 60, "stopEarly": {**WATCHED, "patience": 5}}, "recipe.stopEarly has no effect: 5 eval"),
        ({"evaluateEverySteps": 99, "schedule": PLATEAU | {"patience": 4}}, "recipe.schedule has no effect: 4 evaluat"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("loop", ["trainer", "own"])
def test_the_plan_warns_about_fields_without_effect(changes: Changes, warning: str | None, loop: str) -> None:
    joined = {"trainer.entrypoint": ..., "trainer.command": ["torchrun", "train.py"], "trainer.backend": "Torch"}
    own = joined | {"slice.hardware": "CPU"} if loop == "own" else {}
    job = stored_job({f"recipe.{path}": value for path, value in changes.items()} | own)
    warnings = resolve(job.spec).warnings
    expected = warning if loop == "trainer" else None
    assert len(warnings) == (expected is not None)
    assert all(text.startswith(expected or "") for text in warnings)
