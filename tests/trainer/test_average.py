"""The average of the weights equals plain PyTorch's, is evaluated and kept, and does not affect the training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.trainer import tasks
from tests.trainer.gang import Launcher, start_replicas
from tests.trainer.reference import reference_run
from tpu_trainer.backends.group import Group
from tpu_trainer.backends.torch_dist import TorchDistributed
from tpu_trainer.update import Average

HERE = TorchDistributed(Group(0, 1), torch.device("cpu"))


@pytest.mark.parametrize(("kind", "replicas"), [("torch", 2), ("xla", 1), ("chips", 2), ("xla-spmd", 2)])
def test_the_average_equals_plain_pytorchs_and_is_evaluated_and_checkpointed(
    launcher: Launcher, tmp_path: Path, kind: str, replicas: int
) -> None:
    gang = start_replicas(
        launcher,
        kind,
        replicas,
        entrypoint="tests.trainer.tasks:weighed",
        emaDecay="0.9",
        evaluateEverySteps=7,
        checkpoint={"uri": str(tmp_path), "keep": 1},
    )
    assert set(gang.wait()) == {0}, gang.output()
    expected = reference_run("sgd", steps=24, warmup=5, batch=16, seed=3, decay=0.9)
    assert gang.losses() == pytest.approx(expected.losses, abs=1e-5)
    assert "warning" not in gang.output()
    lengths = [record["evaluation"]["length"] for record in gang.progress() if "evaluation" in record]
    length = torch.stack([one.square().sum() for one in expected.average.values()]).sum().sqrt().item()
    assert lengths[-1] == pytest.approx(length, abs=1e-5)
    assert len(set(lengths)) == len(lengths) == 4

    (folder,) = tmp_path.glob("step-*")
    kept = load_file(folder / "ema.safetensors")
    assert kept.keys() == expected.average.keys()
    for name, value in expected.average.items():
        torch.testing.assert_close(kept[name], value, atol=1e-5, rtol=0)
    # As docs/checkpoints.md says that they are loaded.
    model = tasks.Network()
    shared = {"second.weight": kept["first.weight"]}
    model.load_state_dict(load_file(folder / "model.safetensors") | kept | shared)


def test_the_weights_return_after_an_evaluation_that_failed() -> None:
    model = nn.Linear(2, 1)
    average = Average(model, 0.5, HERE)
    own = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        average.tensors["weight"].zero_()
    seen = []

    def failing() -> None:
        with average.in_model():
            seen.append(model.weight.abs().sum().item())
            raise ValueError("broken metric")

    with pytest.raises(ValueError, match="broken"):
        failing()
    assert seen == [0.0]
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), own, strict=True))


def test_an_unfrozen_weight_joins_the_average_and_a_frozen_one_costs_nothing() -> None:
    model = nn.Linear(2, 1)
    model.weight.requires_grad_(False)
    average = Average(model, 0.5, HERE)
    assert list(average.tensors) == ["bias"]
    model.weight.requires_grad_(True)
    average.update()
    assert set(average.tensors) == {"bias", "weight"}


def test_small_steps_of_low_precision_weights_are_not_lost() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.constant_(model.weight, 0.0)
    average = Average(model, 0.9999, HERE)
    nn.init.constant_(model.weight, 1.0)
    for _ in range(100):
        average.update()
    assert average.tensors["weight"].item() == pytest.approx(1 - 0.9999**100, rel=1e-3)
