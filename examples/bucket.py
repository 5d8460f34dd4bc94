"""Handwritten digits from a bucket: files of examples below `data.uri`, of which each process reads only its own.

`python -m examples.bucket gs://my-bucket/digits` puts them there, or into a directory for a rehearsal. Copy it for data
that does not fit on a host.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import fsspec
import numpy as np
import torch
from examples.digits import loss, metrics, split
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tpu_trainer import Task

SHARDS = 16
HELD_OUT = "held-out.npz"


def task(data_uri: str, hidden: int = 128) -> Task:
    """`data_uri` is the job's `data.uri`; `parameters.hidden` sets the width of the hidden layer."""
    model = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    files = Files(data_uri.rstrip("/"), SHARDS)
    held_out = read(f"{files.folder}/{HELD_OUT}")
    evaluation = TensorDataset(held_out["images"], held_out["labels"])
    return Task(model=model, train=files, loss=loss, evaluation=evaluation, metrics=metrics)


@dataclass(frozen=True)
class Files:
    """The training examples, as the trainer takes a stream in shards. A shard is one file here."""

    folder: str
    num_shards: int

    def shard(self, index: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        examples = read(name(self.folder, index))
        yield from zip(examples["images"], examples["labels"], strict=True)


def name(folder: str, shard: int) -> str:
    return f"{folder}/train-{shard:02d}.npz"


def read(file: str) -> Mapping[str, Tensor]:
    """The file's arrays; `file` may be a path or the address of an object."""
    with fsspec.open(file, "rb") as opened, np.load(io.BytesIO(opened.read())) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays}


def write(folder: str) -> None:
    """Every SHARDS-th example of the digits into the same file, so that each holds all of them."""
    train, held_out = (data.tensors for data in split())
    files = {name(folder, shard): tuple(each[shard::SHARDS] for each in train) for shard in range(SHARDS)}
    for file, (images, labels) in {**files, f"{folder}/{HELD_OUT}": held_out}.items():
        content = io.BytesIO()
        np.savez(content, images=images.numpy(), labels=labels.numpy())
        with fsspec.open(file, "wb", auto_mkdir=True) as opened:
            opened.write(content.getvalue())


if __name__ == "__main__":
    write(sys.argv[1].rstrip("/"))
