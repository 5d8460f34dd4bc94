"""A process of its own, since PJRT starts once per process: snapshots of a model on an XLA device. Prints what it saw.

Run by `test_processes`.
"""

from __future__ import annotations

import copy
import json

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
from torch import nn

from tests.trainer.checkpoint.runs import flat
from tests.trainer.checkpoint.test_snapshot import Tied, through_files
from tpu_trainer.checkpoint.snapshot import LiveState, Snapshot, restore_model, restore_optimizer, take_snapshot
from tpu_trainer.gang.backends.base import move_model

METRICS = ("TransferFromDeviceTime", "CompileTime", "ExecuteTime")


def placed(seed: int, snapshot: Snapshot | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied(torch.bfloat16)
    if snapshot is not None:
        restore_model(snapshot, model)
    move_model(model, torch_xla.device())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    if snapshot is not None:
        restore_optimizer(snapshot, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(8, 4, generator=random, dtype=torch.bfloat16).to(torch_xla.device())
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()


def take(model: nn.Module, optimizer: torch.optim.Optimizer) -> Snapshot:
    return take_snapshot(LiveState(model, optimizer), {"ema": next(model.parameters()).data}, 3, 48, {})


def counts() -> dict[str, int]:
    return {name: (met.metric_data(name) or (0,))[0] for name in METRICS}


def same(one: Snapshot, other: Snapshot) -> bool:
    left, right = flat(one.tensors), flat(other.tensors)
    return left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left)


def main() -> None:
    model, optimizer = placed(seed=0)
    train(model, optimizer, steps=3, seed=1)
    # A program is counted when it ends, and sync(wait=True) does not wait for that.
    xm.wait_device_ops()
    before = counts()
    snapshot = take(model, optimizer)
    cost = {name: count - before[name] for name, count in counts().items()}
    kept = copy.deepcopy(snapshot)
    values = {f"model:{name}": tensor.cpu() for name, tensor in model.state_dict(keep_vars=True).items()}
    read = flat(snapshot.tensors)
    train(model, optimizer, steps=3, seed=2)
    other, fresh = placed(seed=9, snapshot=through_files(kept))
    train(other, fresh, steps=3, seed=2)
    print(
        json.dumps(
            {
                "cost": cost,
                "devices": sorted({tensor.device.type for tensor in read.values()}),
                "types": sorted({str(tensor.dtype) for tensor in read.values()}),
                "equal": all(read[name].equal(value) for name, value in values.items() if name in read),
                "unchanged": same(snapshot, kept),
                "continued": same(take(other, fresh), take(model, optimizer)),
                "shared": other.second.weight is other.first.weight,
                "stepDevices": sorted({state["step"].device.type for state in fresh.state.values()}),
            }
        )
    )


if __name__ == "__main__":
    main()
