"""A real LightningModule under the loop: it trains as by hand, and its hooks are called as Lightning calls them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as lightning
import torch
from torch import nn

from tests.trainer import fork_server, lightning_tasks
from tests.trainer.gang_processes import Launcher, run_spec
from tpu_trainer.data.order import permutation

STEPS, BATCH, SEED, RATE = 6, 16, 3, 0.02
CLOSE = 1e-5


def by_hand() -> tuple[list[float], dict[str, float]]:
    """Losses and final metrics of the module, trained in one process by nothing but torch."""
    torch.manual_seed(SEED)
    network = lightning_tasks.Module(RATE).network
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS)
    features, labels = lightning_tasks.examples(lightning_tasks.TRAINING, 7).tensors
    losses = []
    for step in range(STEPS):
        epoch, j = divmod(step, lightning_tasks.TRAINING // BATCH)
        rows = torch.tensor(permutation(lightning_tasks.TRAINING, SEED, epoch)[j * BATCH : (j + 1) * BATCH])
        loss = nn.functional.cross_entropy(network(features[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    features, labels = lightning_tasks.examples(lightning_tasks.HELD_OUT, 8).tensors
    with torch.no_grad():
        scores = network(features)
    return losses, {
        "val/loss": nn.functional.cross_entropy(scores, labels).item(),
        "val/accuracy": (scores.argmax(dim=1) == labels).float().mean().item(),
        "val/margin": scores.max(dim=1).values.mean().item(),
    }


def spec(**changes: Any) -> dict[str, Any]:
    base = run_spec(entrypoint="tests.trainer.lightning_tasks:pair", trainSteps=STEPS, seed=SEED, **changes)
    return base | {"optimizer": {"name": "adamw", "learningRate": str(RATE)}}


@pytest.mark.parametrize("backend", ["torch", "xla"])
def test_a_lightning_module_on_two_hosts_trains_and_validates_as_by_hand(launcher: Launcher, backend: str) -> None:
    gang = launcher.start(spec(backend=backend, hosts=2), packages=fork_server.FRAMEWORKS)
    assert gang.wait() == [0, 0], gang.output()
    losses, metrics = by_hand()
    assert gang.losses() == pytest.approx(losses, abs=CLOSE)
    for host in gang.hosts:
        found = host.message()["metrics"]
        assert {name: found[name] for name in metrics} == pytest.approx(metrics, abs=CLOSE)


@pytest.mark.filterwarnings("ignore")
def test_hooks_are_called_in_lightnings_order_at_lightnings_places(launcher: Launcher, tmp_path: Path) -> None:
    trainer = lightning.Trainer(
        max_epochs=2,
        accumulate_grad_batches=2,
        check_val_every_n_epoch=2,
        num_sanity_val_steps=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    oracle = lightning_tasks.Recorder(RATE)
    trainer.fit(oracle)
    batch = {"global": BATCH, "perReplica": 8, "accumulation": 2}
    recorded = tmp_path / "calls.json"
    gang = launcher.start(
        spec(replicas=1, batch=batch) | {"entrypoint": "tests.trainer.lightning_tasks:Recorder"},
        packages=fork_server.FRAMEWORKS,
        HOOK_CALLS=str(recorded),
    )
    assert gang.wait() == [0], gang.output()
    calls = json.loads(recorded.read_text())

    # The recipe says when is validated, and the last time is after the training; so the two are compared apart.
    def training(those: list[list[Any]]) -> list[list[Any]]:
        return [call for call in those if "validation" not in call[0]]

    def validation(those: list[list[Any]]) -> list[str]:
        return [name for name, *_ in those if "validation" in name]

    assert training(calls) == training(oracle.calls)
    assert validation(calls) == validation(oracle.calls)
    assert gang.losses() == pytest.approx(by_hand()[0], abs=CLOSE)


def test_a_lightning_module_continues_exactly_with_its_scheduler_and_epoch(launcher: Launcher, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoint = {"uri": str(checkpoints), "everySteps": 4, "keep": 9}
    whole = launcher.start(spec(backend="torch", checkpoint=checkpoint), packages=fork_server.FRAMEWORKS)
    assert whole.wait() == [0], whole.output()
    (last,) = checkpoints.glob("step-00000006-*")
    shutil.rmtree(last)
    rest = launcher.start(spec(backend="torch", checkpoint=checkpoint), packages=fork_server.FRAMEWORKS)
    assert rest.wait() == [0], rest.output()
    assert rest.losses() == whole.losses()[4:]
    metrics, expected = rest.hosts[0].message()["metrics"], whole.hosts[0].message()["metrics"]
    assert metrics == expected
