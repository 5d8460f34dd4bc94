"""The images of bench/trainer are the same in every run, and each is another part of its file whenever it is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from bench.trainer import images


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "FILES", 3)


def test_the_files_are_jpegs_of_several_sizes_the_same_every_time_and_do_not_stay() -> None:
    written = []
    for _ in range(2):
        with images.written():
            folder = Path(os.environ[images.FOLDER])
            written.append([file.read_bytes() for file in sorted(folder.iterdir())])
        assert not folder.exists()
        assert images.FOLDER not in os.environ
    first, again = written
    assert first == again
    assert len(set(first)) == 3
    assert all(file.startswith(b"\xff\xd8\xff") for file in first)


def test_an_image_is_read_at_one_size_and_scale_and_never_twice_the_same() -> None:
    torch.manual_seed(0)
    with images.written():
        photographs = images.Photographs()
        (one, label), (other, same) = photographs[4], photographs[4]
    assert (one.shape, one.dtype, label, same) == ((3, images.SIDE, images.SIDE), torch.float32, 1, 1)
    assert not torch.equal(one, other)
    assert -2.2 < one.min() < one.max() < 2.7
