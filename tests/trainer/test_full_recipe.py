"""Accumulation, clipping and the average of the weights at once, on every backend: as plain PyTorch does them.

One gang for each backend. What each of them does alone, `test_clipping` and `test_average` show.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer import tasks
from tests.trainer.gang import KINDS, Gang, Launcher, start_replicas
from tests.trainer.reference import Reference, reference_run
from tests.trainer.test_clipping import LIMIT
from tests.trainer.test_trajectories import CLOSE

DECAY = 0.9


@dataclass(frozen=True)
class Trained:
    """`folder`: the checkpoint after the last step."""

    gang: Gang
    folder: Path


@pytest.fixture(scope="module")
def reference() -> Reference:
    made = reference_run("sgd", steps=24, warmup=5, batch=16, seed=3, decay=DECAY, limit=LIMIT)
    assert min(made.norms) < LIMIT < max(made.norms)
    return made


@pytest.fixture(scope="module", params=KINDS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    directory = tmp_path_factory.mktemp(request.param)
    launcher = Launcher(directory)
    try:
        gang = start_replicas(
            launcher,
            request.param,
            2,
            entrypoint="tests.trainer.tasks:weighed",
            batch={"global": 16, "perReplica": 4, "accumulation": 2},
            gradientClipNorm=str(LIMIT),
            emaDecay=str(DECAY),
            evaluateEverySteps=7,
            checkpoint={"uri": str(directory / "checkpoints"), "keep": 1},
        )
        assert set(gang.wait()) == {0}, gang.output()
        (folder,) = (directory / "checkpoints").glob("step-*")
        yield Trained(gang, folder)
    finally:
        launcher.reap()


def test_accumulated_passes_are_clipped_once_a_step(trained: Trained, reference: Reference) -> None:
    assert trained.gang.losses() == pytest.approx(reference.losses, abs=CLOSE)
    assert "warning" not in trained.gang.output()


def test_the_average_is_what_is_evaluated(trained: Trained, reference: Reference) -> None:
    lengths = [record["evaluation"]["length"] for record in trained.gang.progress() if "evaluation" in record]
    length = torch.stack([one.square().sum() for one in reference.average.values()]).sum().sqrt().item()
    assert lengths[-1] == pytest.approx(length, abs=CLOSE)
    assert len(set(lengths)) == len(lengths) == 4


def test_the_average_is_in_the_checkpoint_and_loads_as_the_documentation_says(
    trained: Trained, reference: Reference
) -> None:
    kept = load_file(trained.folder / "ema.safetensors")
    assert kept.keys() == reference.average.keys()
    for name, value in reference.average.items():
        torch.testing.assert_close(kept[name], value, atol=CLOSE, rtol=0)
    model = tasks.Network()
    shared = {"second.weight": kept["first.weight"]}
    model.load_state_dict(load_file(trained.folder / "model.safetensors") | kept | shared)
