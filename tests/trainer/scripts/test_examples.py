"""The examples beside digits learn what they are there to show."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from examples import bucket, causal_lm, lightning_digits
from examples.digits import split
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from tests.trainer import in_process
from tests.trainer.gang_processes import Launcher, run_spec
from tpu_contract.protocol import ExitCode

if TYPE_CHECKING:
    from torch import Tensor


def test_the_lightning_digits_reach_93_percent_on_two_hosts_and_leave_their_weights(
    launcher: Launcher, tmp_path: Path
) -> None:
    gang = launcher.start(
        run_spec(
            hosts=2,
            entrypoint="examples.lightning_digits:task",
            batch={"global": 64, "perReplica": 8},
            trainSteps=300,
            warmupSteps=0,
            parameters={"hidden": "128"},
        )
        | {"optimizer": {"name": "sgd", "learningRate": "0.2", "weightDecay": "0.0001"}},
        TPUJOB_REPORT_DIRECTORY=str(tmp_path),
    )
    assert gang.wait() == [0, 0], gang.output()
    assert gang.hosts[1].message()["metrics"]["val_accuracy"] >= 0.93
    module, data = lightning_digits.task(learning_rate=0.2, weight_decay=0.0, hidden=128)
    module.load_state_dict(load_file(tmp_path / "model.safetensors"))
    data.setup("validate")
    images, labels = next(iter(DataLoader(data.val_dataloader().dataset, batch_size=64)))
    assert (module(images).argmax(dim=1) == labels).float().mean() >= 0.85


def test_the_language_model_learns_which_bytes_follow_which(launcher: Launcher) -> None:
    gang = launcher.start(
        run_spec(
            entrypoint="examples.causal_lm:task",
            batch={"global": 32, "perReplica": 4},
            trainSteps=80,
            warmupSteps=5,
            parameters={"context": "32", "layers": "1"},
        )
        | {"optimizer": {"name": "adamw", "learningRate": "0.01"}}
    )
    assert gang.wait() == [0], gang.output()
    # Begins where all 256 bytes are equally probable, 5.5 nats; how often each occurs alone gives 3.3.
    assert gang.losses()[0] > 5.0
    assert gang.hosts[0].message()["metrics"]["evaluation_loss"] < frequencies_alone()


def test_the_digits_of_a_bucket_are_those_of_the_package_and_are_learnt_from_their_files(tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    bucket.write(str(folder))
    document = run_spec(
        entrypoint="examples.bucket:task",
        dataUri=str(folder),
        datasetSize=1437,
        batch={"global": 32, "perReplica": 4},
        trainSteps=120,
        warmupSteps=5,
    ) | {"optimizer": {"name": "sgd", "learningRate": "0.05", "momentum": "0.9"}}
    run = in_process.run(document, tmp_path)
    assert run.outcome.code is ExitCode.Succeeded, run.outcome.message
    assert run.outcome.metrics["accuracy"] >= 0.85
    shards = bucket.Files(str(folder), bucket.SHARDS)
    read = [example for shard in range(bucket.SHARDS) for example in shards.shard(shard, bucket.SHARDS)]
    train, _ = split()
    assert sorted(map(as_bytes, read)) == sorted(map(as_bytes, train))


def as_bytes(example: tuple[Tensor, Tensor]) -> bytes:
    return b"".join(each.numpy().tobytes() for each in example)


def frequencies_alone() -> float:
    """The loss, in nats, of a model that knows how often each byte occurs and nothing else."""
    counts = np.bincount(np.load(causal_lm.TOKENS))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
