"""One process reads the checkpoint; all continue from it as if each had read it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from tests.trainer import plain as plain_pytorch
from tests.trainer.checkpoint.counted_reads import READS
from tests.trainer.checkpoint.runs import author, flat
from tests.trainer.gang_processes import Launcher, run_spec
from tests.trainer.in_threads import ThreadBackend, in_threads
from tpu_contract.protocol import ExitCode
from tpu_trainer.checkpoint.catalogue import LoadedCheckpoint
from tpu_trainer.checkpoint.commit import COMMIT, Commit, Folder, Mark
from tpu_trainer.checkpoint.handover import (
    SMALL,
    fetch_hooks_state,
    give_average,
    give_model,
    give_optimizer,
    read_once,
)
from tpu_trainer.checkpoint.snapshot import LiveState, Snapshot, take_snapshot
from tpu_trainer.contract.errors import PeerLostError, StorageDeniedError, TrainerError, UserCodeError
from tpu_trainer.optim.update import Average

WORLD, READER = 3, 1


def together(run: Callable[[ThreadBackend], Any], keep: type[Exception] | tuple[()] = ()) -> list[Any]:
    """`run` in every one of WORLD replicas, which share a store."""
    store = HashStore()

    def replica(backend: ThreadBackend) -> Any:
        backend.store = store
        return run(backend)

    return in_threads(WORLD, replica, keep)


class Counting(torch.optim.AdamW):
    """Looks at its state while it loads it."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.seen = sum(float(state["exp_avg"].sum()) for state in self.state.values())


class Scaled(nn.Linear):
    """Looks at its weights while it loads them."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *others)
        self.scale = float(state_dict[f"{prefix}weight"].sum())


Parts = tuple[nn.Module, torch.optim.Optimizer]


def plain(seed: int) -> Parts:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 10), nn.BatchNorm1d(10))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def half_precision(seed: int) -> Parts:
    torch.manual_seed(seed)
    model = nn.Linear(20, 10, dtype=torch.bfloat16)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def looking(seed: int) -> Parts:
    torch.manual_seed(seed)
    model = Scaled(20, 10)
    return model, Counting(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    kind = next(model.parameters()).dtype
    for _ in range(3):
        model(torch.randn(8, 20, dtype=kind)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(make: Callable[[int], Parts]) -> LoadedCheckpoint:
    """A checkpoint of a model that has made three steps."""
    model, optimizer = make(0)
    train(model, optimizer)
    average = {name: parameter.detach() / 2 for name, parameter in model.named_parameters()}
    hooks = {"best": torch.arange(SMALL + 1.0), "worst": torch.tensor(-0.0), "note": "three"}
    snapshot = take_snapshot(
        LiveState(model, optimizer, average), hooks, 3, 48, {"loss": float("nan"), "position": [0, 48]}
    )
    return LoadedCheckpoint(Folder(3, "5f0c1234", 1), Commit(3, 48, author(), {"state.json": Mark(3, 4)}), snapshot)


@pytest.mark.parametrize("make", [plain, half_precision, looking])
def test_all_processes_hold_what_the_reader_has_read(make: Callable[[int], Parts]) -> None:
    found = trained(make)

    def continued(backend: ThreadBackend) -> tuple[LoadedCheckpoint, Snapshot, Parts]:
        given = read_once(backend, backend.rank == READER, lambda: found)
        model, optimizer = make(backend.rank + 1)
        average = Average(model, 0.5, backend)
        give_model(given, model, backend)
        give_optimizer(given, optimizer, backend)
        give_average(given, average, backend)
        state = fetch_hooks_state(given, backend)
        return given, take_snapshot(LiveState(model, optimizer, average.tensors), state, 3, 48, {}), (model, optimizer)

    expected = flat(found.snapshot.tensors)
    for given, held, (model, optimizer) in together(continued):
        assert (given.folder, given.commit, given.reader) == (found.folder, found.commit, READER)
        assert str(given.snapshot.document) == str(found.snapshot.document)
        assert held.trees == found.snapshot.trees
        tensors = flat(held.tensors)
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            assert tensor.dtype == expected[name].dtype, name
            assert tensor.reshape(-1).view(torch.uint8).equal(expected[name].reshape(-1).view(torch.uint8)), name
        if isinstance(model, Scaled) and isinstance(optimizer, Counting):
            assert model.scale == float(expected["model:weight"].sum())
            assert optimizer.seen == sum(float(t.sum()) for n, t in expected.items() if n.endswith("exp_avg"))


def test_only_the_reader_holds_the_large_tensors_before_they_are_in_their_places() -> None:
    found = trained(plain)

    def heard(backend: ThreadBackend) -> set[str]:
        tensors = flat(read_once(backend, backend.rank == READER, lambda: found).snapshot.tensors)
        return {name for name, tensor in tensors.items() if not tensor.is_meta and tensor.numel() > SMALL}

    reader, *others = (held for _, held in sorted(enumerate(together(heard)), key=lambda one: one[0] != READER))
    assert "model:0.weight" in reader
    assert others == [set()] * (WORLD - 1)


def test_where_there_is_no_checkpoint_all_begin_at_step_0() -> None:
    assert together(lambda backend: read_once(backend, backend.rank == READER, lambda: None)) == [None] * WORLD


@pytest.mark.parametrize(
    ("error", "elsewhere", "said"),
    [
        (StorageDeniedError("gs://b: no rights"), StorageDeniedError, "gs://b: no rights"),
        (UserCodeError("checkpoint.resumeFrom: there is none"), UserCodeError, "checkpoint.resumeFrom: there is none"),
        (ZeroDivisionError("x"), PeerLostError, "the process that reads the checkpoint failed: x"),
    ],
)
def test_what_the_reader_fails_with_ends_all(error: Exception, elsewhere: type[TrainerError], said: str) -> None:
    def read() -> LoadedCheckpoint:
        raise error

    ends = together(lambda backend: read_once(backend, backend.rank == READER, read), keep=Exception)
    assert ends[READER] is error
    assert [(type(end), str(end)) for rank, end in enumerate(ends) if rank != READER] == [(elsewhere, said)] * 2


def checkpoints(directory: Path) -> list[Path]:
    return sorted(directory.glob("step-*/"))


def files_in(folder: Path) -> int:
    """Their bytes together."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.name != COMMIT)


def test_a_gang_reads_its_checkpoint_once_and_falls_back_alike(launcher: Launcher, tmp_path: Path) -> None:
    directory, reads = tmp_path / "checkpoints", tmp_path / "reads"
    reads.mkdir()
    checkpoint = {"uri": str(directory), "everySteps": 6, "keep": 2}
    first = launcher.start(run_spec(replicas=1, trainSteps=12, optimizer="adamw", checkpoint=checkpoint))
    assert first.wait() == [0], first.output()
    whole, damaged = checkpoints(directory)
    size = files_in(whole) + files_in(damaged)
    model = damaged / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"?")

    spec = run_spec(hosts=2, replicas=2, optimizer="adamw", checkpoint=checkpoint)
    rest = launcher.start(spec, module="tests.trainer.checkpoint.counted_reads", **{READS: str(reads)})
    assert rest.wait() == [0] * 2, rest.output()
    assert rest.losses() == pytest.approx(plain_pytorch.small("adamw")[6:], abs=1e-5)
    reader, other = (int((reads / str(host)).read_text()) for host in range(2))
    assert 0 < reader <= size
    # Nothing but host 0's random number, which shows that the storage is shared.
    assert other <= 20


def test_a_reader_that_storage_refuses_ends_all_hosts_with_its_sentence(launcher: Launcher, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    gang = launcher.start(run_spec(hosts=2, replicas=2, checkpoint={"uri": str(blocked / "here"), "keep": 1}))
    assert gang.wait() == [ExitCode.StorageFailed] * 2, gang.output()
    first, second = (host.message()["message"] for host in gang.hosts)
    assert first == second
    assert first.startswith(f"{blocked / 'here'}: ")
