"""The examples learn what they are there to show."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from tests.trainer import in_process
from tests.trainer.gang_processes import run_spec
from tpu_contract.protocol import ExitCode

if TYPE_CHECKING:
    from torch import Tensor


def trained(folder: Path, optimizer: dict[str, str], **changes: Any) -> in_process.Run:
    run = in_process.run(run_spec(**changes) | {"optimizer": optimizer}, folder)
    assert run.outcome.code is ExitCode.Succeeded, run.outcome.message
    return run


def test_the_digits_reach_95_percent_with_the_numbers_for_four_hosts(tmp_path: Path) -> None:
    run = trained(
        tmp_path,
        {"name": "sgd", "learningRate": "0.2", "momentum": "0.9", "weightDecay": "0.0001"},
        replicas=16,
        entrypoint="examples.digits:task",
        batch={"global": 128, "perReplica": 8},
        trainSteps=300,
        warmupSteps=20,
        parameters={"hidden": "128"},
    )
    assert run.outcome.metrics["accuracy"] >= 0.95


def test_the_lightning_digits_reach_93_percent_and_leave_their_weights(tmp_path: Path) -> None:
    run = trained(
        tmp_path,
        {"name": "sgd", "learningRate": "0.2", "weightDecay": "0.0001"},
        entrypoint="examples.lightning_digits:task",
        batch={"global": 64, "perReplica": 8},
        trainSteps=300,
        warmupSteps=0,
        parameters={"hidden": "128"},
    )
    assert run.outcome.metrics["val_accuracy"] >= 0.93
    # Here, as in other tests, so that a lane that runs none of these imports no framework.
    from examples import lightning_digits

    module, data = lightning_digits.task(learning_rate=0.2, weight_decay=0.0, hidden=128)
    module.load_state_dict(load_file(tmp_path / "reports" / "model.safetensors"))
    data.setup("validate")
    images, labels = next(iter(DataLoader(data.val_dataloader().dataset, batch_size=64)))
    assert (module(images).argmax(dim=1) == labels).float().mean() >= 0.85


def test_the_language_model_learns_which_bytes_follow_which(tmp_path: Path) -> None:
    run = trained(
        tmp_path,
        {"name": "adamw", "learningRate": "0.01"},
        entrypoint="examples.causal_lm:task",
        batch={"global": 32, "perReplica": 4},
        trainSteps=50,
        warmupSteps=5,
        parameters={"context": "32", "layers": "1"},
    )
    # Begins where all 256 bytes are equally probable, 5.5 nats; how often each occurs alone gives 3.3.
    assert run.losses[0] > 5.0
    assert run.outcome.metrics["evaluation_loss"] < frequencies_alone()


def test_the_digits_of_a_bucket_are_those_of_the_package_and_are_learnt_from_their_files(tmp_path: Path) -> None:
    from examples import bucket
    from examples.digits import split

    folder = tmp_path / "digits"
    bucket.write(str(folder))
    run = trained(
        tmp_path,
        {"name": "sgd", "learningRate": "0.05", "momentum": "0.9"},
        entrypoint="examples.bucket:task",
        dataUri=str(folder),
        datasetSize=1437,
        batch={"global": 32, "perReplica": 4},
        trainSteps=120,
        warmupSteps=5,
    )
    assert run.outcome.metrics["accuracy"] >= 0.85
    shards = bucket.Files(str(folder), bucket.SHARDS)
    read = [example for shard in range(bucket.SHARDS) for example in shards.shard(shard, bucket.SHARDS)]
    train, _ = split()
    assert sorted(map(as_bytes, read)) == sorted(map(as_bytes, train))


def as_bytes(example: tuple[Tensor, Tensor]) -> bytes:
    return b"".join(each.numpy().tobytes() for each in example)


def frequencies_alone() -> float:
    """The loss, in nats, of a model that knows how often each byte occurs and nothing else."""
    from examples import causal_lm

    counts = np.bincount(np.load(causal_lm.TOKENS))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
