"""checkpoint.initFrom: which weights a model begins with, and what is said if they do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from syrupy.assertion import SnapshotAssertion
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.trainer.checkpoint.runs import author
from tests.trainer.whole_runs import Ran, run
from tpu_contract.protocol import ExitCode
from tpu_contract.run_spec import InitSpec
from tpu_trainer import Hyperparameters, Task
from tpu_trainer.checkpoint.commit import Commit, Folder, Mark
from tpu_trainer.checkpoint.initial import load_initial_weights, load_weights
from tpu_trainer.storage.store import DirectoryStore


class Tied(nn.Module):
    def __init__(self, out: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, out)
        self.unembed = self.embed


TENSORS = {
    "embed.weight": torch.full((4, 4), 1.0),
    "norm.weight": torch.full((4,), 2.0),
    "norm.bias": torch.full((4,), 3.0),
    "norm.running_mean": torch.full((4,), 4.0),
    "norm.running_var": torch.full((4,), 5.0),
    "norm.num_batches_tracked": torch.tensor(6),
    "head.weight": torch.full((3, 4), 7.0),
    "head.bias": torch.full((3,), 8.0),
}


def without(*names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in TENSORS.items() if name not in names}


FITS: list[tuple[str, dict[str, Tensor], str]] = [
    ("everything", TENSORS, ""),
    (
        "a shared weight by its other name",
        {**without("embed.weight"), "unembed.weight": TENSORS["embed.weight"]},
        "",
    ),
    ("another floating-point type", TENSORS | {"head.bias": TENSORS["head.bias"].bfloat16()}, ""),
    (
        "tensors that lack",
        without("head.bias", "embed.weight"),
        "the model has, and they lack: embed.weight, head.bias",
    ),
    ("tensors too many", TENSORS | {"old.bias": torch.zeros(1)}, "they have, and the model lacks: old.bias"),
    (
        "another shape",
        TENSORS | {"head.bias": torch.zeros(9)},
        "differ: head.bias (float32 [9] there, float32 [3] in the model)",
    ),
    (
        "another kind of number",
        TENSORS | {"norm.num_batches_tracked": torch.tensor(6.0)},
        "differ: norm.num_batches_tracked (float32 [] there, int64 [] in the model)",
    ),
]


@pytest.mark.parametrize(("given", "differences"), [row[1:] for row in FITS], ids=[row[0] for row in FITS])
@pytest.mark.parametrize("strict", [True, False])
def test_what_fits_is_loaded_unless_all_must_fit(given: dict[str, Tensor], differences: str, strict: bool) -> None:
    model = Tied()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fit = load_weights(given, model, strict=strict)
    assert fit.differences == differences
    assert model.embed.weight is model.unembed.weight
    for name, tensor in model.state_dict().items():
        taken = given.get(name, given.get("unembed.weight") if name == "embed.weight" else None)
        fits = taken is not None and taken.shape == tensor.shape and f"{name} (" not in differences
        if strict and differences:
            assert torch.equal(tensor, before[name]), name
        elif fits:
            assert torch.equal(tensor, given.get(name, TENSORS["embed.weight"]).to(tensor.dtype)), name


def task(width: int = 1) -> Any:
    def made(hp: Hyperparameters, rank: int) -> Task:
        data = TensorDataset(torch.randn(64, 3, generator=torch.Generator().manual_seed(1)))
        # Weights that differ between the replicas at first: only one of them needs to read.
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, width))
        return Task(model, data, lambda model, batch: model(batch[0]).square().mean())

    return made


def trained(directory: Path, name: str, *, width: int = 1, init: dict[str, Any] | None = None, **changes: Any) -> Ran:
    checkpoint = {"uri": f"{directory}/default/{name}", "keep": 2, **({"initFrom": init} if init else {})}
    job = {"namespace": "default", "name": name, "uid": f"{name}-uid", "attempt": changes.pop("attempt", 1)}
    replicas = changes.pop("replicas", 1)
    return run(task(width), replicas, job=job, checkpoint=checkpoint, **{"trainSteps": 10, **changes})


def kept(directory: Path, name: str, step: int, file: str = "model") -> dict[str, Tensor]:
    (found,) = (directory / "default" / name).glob(f"step-{step:08}-*")
    return load_file(found / f"{file}.safetensors")


def test_a_job_begins_with_another_jobs_weights_at_step_0_and_says_so(tmp_path: Path) -> None:
    """With a learning rate of almost 0, the weights after its training are those of its beginning."""
    trained(tmp_path, "first", emaDecay="0.5")
    still = {"name": "sgd", "learningRate": "1e-30"}
    there = {"uri": f"{tmp_path}/default/first"}
    second = trained(tmp_path, "second", init=there, recipe=still, seed=9, replicas=2)
    assert second.outcome.code is ExitCode.Succeeded
    assert len(second.losses) == 10
    second.assert_replicas_equal()
    # What was evaluated there: the averaged weights.
    for name, tensor in kept(tmp_path, "second", 10).items():
        assert torch.equal(tensor, kept(tmp_path, "first", 10, "ema")[name]), name
    (state,) = (tmp_path / "default" / "second").glob("step-*/state.json")
    assert "job default/first, attempt 1" in state.read_text()


def test_a_job_with_a_checkpoint_of_its_own_does_not_begin_again(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    save_file({"0.weight": torch.ones(2, 3)}, tmp_path / "w.safetensors")
    partly = {"uri": f"{tmp_path}/w.safetensors", "strict": False}
    first = trained(tmp_path, "job", init=partly)
    assert [warning for warning in first.warnings if "initFrom" in warning] == snapshot
    (tmp_path / "w.safetensors").unlink()
    again = trained(tmp_path, "job", init=partly, attempt=2)
    assert again.outcome.message.startswith("nothing left to train")


def test_a_named_checkpoint_is_taken_and_otherwise_the_newest_clean_one(tmp_path: Path) -> None:
    spec = {"trainSteps": 20, "onNotFinite": "Warn"}
    trained(tmp_path, "first", **spec)
    (folder,) = (tmp_path / "default" / "first").glob("step-*")
    named = trained(tmp_path, "named", init={"uri": str(folder)})
    assert named.outcome.code is ExitCode.Succeeded
    commit = folder / "COMMIT"
    commit.write_text(commit.read_text().replace('"clean": true', '"clean": false'))
    unclean = trained(tmp_path, "unclean", init={"uri": str(folder.parent)})
    assert unclean.outcome.code is ExitCode.UserError
    assert "is no whole checkpoint in" in unclean.outcome.message


def test_weights_in_parts_are_taken_together(tmp_path: Path) -> None:
    weights = {
        "0.weight": torch.ones(2, 3),
        "0.bias": torch.ones(2),
        "1.weight": torch.ones(1, 2),
        "1.bias": torch.ones(1),
    }
    parts = {
        "model-00001-of-00002.safetensors": {"0.weight": weights["0.weight"], "1.bias": weights["1.bias"]},
        "model-00002-of-00002.safetensors": {"0.bias": weights["0.bias"], "1.weight": weights["1.weight"]},
        "ema-00001-of-00001.safetensors": {"1.bias": torch.full((1,), 5.0)},
    }
    store, folder = DirectoryStore(tmp_path), Folder(7, "5f0c1234", 1)
    files = {name: save(tensors) for name, tensors in parts.items()}
    for name, data in files.items():
        store.put(f"{folder}/{name}", data)
    marks = {name: Mark.of(data) for name, data in files.items()}
    store.put(f"{folder}/COMMIT", Commit(7, 70, author(), marks).to_json())
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    source, difference = load_initial_weights(InitSpec(str(tmp_path)), model)
    assert (source.partition(" of ")[0], difference) == ("4 tensors", None)
    assert model[1].bias.item() == 5.0
    assert all(torch.equal(weights[name], model.state_dict()[name]) for name in ("0.weight", "0.bias", "1.weight"))


@pytest.mark.parametrize(
    ("uri", "content", "why"),
    [
        ("w.safetensors", None, "w.safetensors is not there"),
        ("w.safetensors", b"\x00" * 40, "is not a safetensors file"),
        ("nothing/here", None, "is no whole checkpoint in"),
    ],
)
def test_weights_that_cannot_be_read_end_the_job(tmp_path: Path, uri: str, content: bytes | None, why: str) -> None:
    if content is not None:
        (tmp_path / uri).write_bytes(content)
    ran = trained(tmp_path, "job", init={"uri": f"{tmp_path}/{uri}"})
    assert ran.outcome.code is ExitCode.UserError
    assert ran.outcome.message.startswith("checkpoint.initFrom: ")
    assert why in ran.outcome.message
    assert ran.losses == []


def test_weights_of_another_model_are_refused_even_partly(tmp_path: Path) -> None:
    save_file({"other.weight": torch.ones(2, 3)}, tmp_path / "w.safetensors")
    ran = trained(tmp_path, "job", init={"uri": f"{tmp_path}/w.safetensors", "strict": False})
    assert ran.outcome.code is ExitCode.UserError
    assert "has, and they lack: 0.bias" in ran.outcome.message
