"""Input that costs something: JPEG files that worker processes decode, crop, resize, flip and normalise.

The files are made up but the same in every run, photographs in what costs time: their sizes, and detail at every scale.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from PIL import Image

FOLDER = "BENCH_IMAGES"
"""The environment variable with the folder of the files, which all runs of a part share."""

FILES, CLASSES, SIDE, LENGTH = 300, 10, 64, 1_000_000
_STRENGTHS = {2: 40, 8: 25, 32: 15, 128: 8}
"""How much an image varies over as many cells."""

_MEAN, _DEVIATION = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
_SCALE, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


@contextmanager
def written() -> Iterator[None]:
    """Keeps the files in a folder of their own, which FOLDER names, while the block runs."""
    with tempfile.TemporaryDirectory() as folder:
        random = np.random.default_rng(0)
        for number in range(FILES):
            _photograph(random, number % CLASSES).save(Path(folder, f"{number:03}.jpg"), quality=90)
        os.environ[FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[FOLDER]


class Photographs(Dataset[tuple[Tensor, int]]):
    """The files as one long dataset, each time another part of the image, with the class of the image."""

    def __init__(self) -> None:
        self._files = sorted(Path(os.environ[FOLDER]).glob("*.jpg"))

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        number = index % len(self._files)
        with Image.open(self._files[number]) as image:
            box = _part(*image.size)
            pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR, box))
        tensor = (torch.from_numpy(pixels.astype(np.float32) / 255) - _MEAN) / _DEVIATION
        tensor = tensor.permute(2, 0, 1)
        return tensor.flip(2) if torch.rand(()) < 0.5 else tensor.contiguous(), number % CLASSES


def _part(width: int, height: int) -> tuple[float, float, float, float]:
    """Draws the part of an image to train on, by the rule of torchvision's RandomResizedCrop."""
    for _ in range(10):
        area = width * height * float(torch.empty(()).uniform_(*_SCALE))
        ratio = float(torch.empty(()).uniform_(*np.log(_RATIO)).exp())
        wide, high = (area * ratio) ** 0.5, (area / ratio) ** 0.5
        if wide <= width and high <= height:
            left, top = (torch.rand(2) * torch.tensor([width - wide, height - high])).tolist()
            return left, top, left + wide, top + high
    return 0, 0, width, height


def _photograph(random: np.random.Generator, kind: int) -> Image.Image:
    """Draws an image of a size that photographs in data sets have; its class shows in its colours."""
    from PIL import Image

    width, height = (int(side) for side in random.integers(300, 640, 2))
    colour = np.random.default_rng(kind).uniform(60, 200, 3)
    pixels = np.zeros((height, width, 3), np.float32) + colour
    for cells, strength in _STRENGTHS.items():
        noise = random.uniform(-1, 1, (cells, cells, 3)) * strength
        coarse = Image.fromarray((noise + 128).clip(0, 255).astype(np.uint8))
        pixels += np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float32) - 128
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
