"""Whole runs whose checkpoints, or whose data, are not what the attempt before has left."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from tests.trainer.checkpoint.faults import Faulty, Lag
from tests.trainer.checkpoint.lives import DAMAGE, committed
from tests.trainer.whole_runs import Ran, Stopping, run
from tpu_contract.protocol import ExitCode
from tpu_trainer import Hyperparameters, Task
from tpu_trainer.checkpoint.commit import COMMIT
from tpu_trainer.data.loading import describe_resize
from tpu_trainer.data.order import Position
from tpu_trainer.loop import checkpoints as trainer_storage
from tpu_trainer.storage import open_store
from tpu_trainer.storage.store import DirectoryStore

EXAMPLES = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
NEWEST = "step-00000008-smalluid-1"


def task(width: int = 1, train: Any = None) -> Callable[[Hyperparameters, int], Task]:
    def made(hp: Hyperparameters, rank: int) -> Task:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, width))
        data = TensorDataset(EXAMPLES) if train is None else train()
        return Task(model, data, lambda model, batch: model(batch[0]).square().mean())

    return made


def attempt(number: int, directory: Path, made: Any = None, *, until: int | None = None, **spec: Any) -> Ran:
    """Of one job. `until`: it is told to stop then."""
    job = {"namespace": "default", "name": "small", "uid": "small-uid", "attempt": number}
    checkpoint = {"uri": str(directory), "keep": spec.pop("keep", 1), "everySteps": 4}
    stop, replicas = None if until is None else Stopping(until), spec.pop("replicas", 1)
    changes = {"trainSteps": 12, **spec}
    return run(made or task(), replicas, stop=stop, job=job, checkpoint=checkpoint, **changes)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("damage", ["a missing file of weights", "a newer format"])
def test_an_attempt_that_can_continue_none_of_its_jobs_checkpoints_trains_nothing(
    damage: str, replicas: int, tmp_path: Path
) -> None:
    attempt(1, tmp_path, trainSteps=8, replicas=replicas)
    store = DirectoryStore(tmp_path)
    DAMAGE[damage](store, NEWEST)
    before = committed(store)
    ran = attempt(2, tmp_path, replicas=replicas)
    assert ran.outcome.code is ExitCode.CheckpointUnusable
    assert f"checkpoint {NEWEST} is passed over: its " in ran.outcome.message
    assert ran.losses == []
    assert committed(store) == before


@pytest.mark.parametrize("change", [{"made": task(width=2)}, {"seed": 9}], ids=["shape", "seed"])
def test_an_image_that_has_changed_under_its_tag_does_not_train_from_step_0(
    change: dict[str, Any], tmp_path: Path
) -> None:
    attempt(1, tmp_path, until=8)
    ran = attempt(2, tmp_path, **change)
    assert ran.outcome.code is ExitCode.CheckpointUnusable
    assert "another task, model or seed" in ran.outcome.message


def test_a_run_that_falls_back_says_so_in_its_status(tmp_path: Path) -> None:
    attempt(1, tmp_path, keep=3, until=8)
    DAMAGE["a short file of weights"](DirectoryStore(tmp_path), NEWEST)
    ran = attempt(2, tmp_path, keep=3)
    assert ran.outcome.code is ExitCode.Succeeded
    assert len(ran.losses) == 8
    assert any(re.search(f"not the newest: checkpoint {NEWEST} is passed over", text) for text in ran.warnings)


@pytest.mark.parametrize("lacks", ["model.safetensors", COMMIT])
def test_a_run_on_a_file_system_that_lags_continues_bit_for_bit(
    lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = attempt(1, tmp_path / "whole")
    attempt(1, tmp_path / "job", until=8)
    lag = Lag(lambda name: name == f"{NEWEST}/{lacks}", 2)
    monkeypatch.setattr(trainer_storage, "open_store", lambda uri: Faulty(open_store(uri), lag))
    ran = attempt(2, tmp_path / "job")
    assert ran.losses == whole.losses[8:]
    assert not ran.warnings


class Rows(IterableDataset[tuple[Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor]]:
        return ((row,) for row in EXAMPLES)


def test_a_stream_that_begins_its_epoch_again_is_a_warning(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    attempt(1, tmp_path, task(train=Rows), until=6)
    ran = attempt(2, tmp_path, task(train=Rows))
    assert [text for text in ran.warnings if "begins again" in text] == snapshot


def test_data_that_has_grown_between_two_attempts_is_a_warning(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    attempt(1, tmp_path, until=6)
    grown = task(train=lambda: TensorDataset(torch.cat([EXAMPLES, EXAMPLES[:16]])))
    ran = attempt(2, tmp_path, grown)
    assert [text for text in ran.warnings if "examples, and had" in text] == snapshot
    assert not [text for text in attempt(3, tmp_path, grown).warnings if "examples, and had" in text]


@pytest.mark.parametrize(
    ("before", "now", "offset", "said"),
    [
        (None, 64, 32, None),
        (64, 64, 32, None),
        (64, 80, 0, "from epoch 1 on, all of them are used"),
        (64, 60, 32, "the rest of epoch 1 follows another order"),
    ],
)
def test_the_size_of_the_data_is_compared_where_it_is_known(
    before: int | None, now: int, offset: int, said: str | None
) -> None:
    text = describe_resize(TensorDataset(torch.zeros(now)), before, Position(1, offset))
    assert (text is None) if said is None else (said in str(text))


def test_data_that_is_too_short_for_a_batch_ends_the_run(tmp_path: Path) -> None:
    attempt(1, tmp_path, until=6)
    ran = attempt(2, tmp_path, task(train=lambda: TensorDataset(EXAMPLES[:10])))
    assert ran.outcome.code is ExitCode.UserError
    assert "10 examples, fewer than one" in ran.outcome.message
    assert "16" in ran.outcome.message
