"""Which sizes the doctor advises to change, so that matrix products are not spent on padding."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tpu_trainer.doctor import padding


def linears(*sizes: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(*pair) for pair in pairwise(sizes)])


@pytest.mark.parametrize(
    ("model", "rows", "words"),
    [
        (linears(1024, 1024), 8, None),
        (linears(1024, 1024), 4, ["50%", "4 examples per replica are computed as 8 rows"]),
        (linears(1024, 1024), 1000, None),
        (linears(1000, 1000), 64, None),  # 5 % of padding
        (linears(1050, 1050), 64, ["17%", "0.weight [1050, 1050] is computed as [1152, 1152]"]),
        (linears(65, 200, 65), 4, None),  # too small to be what a step waits for
    ],
)
def test_padding_is_reported_if_it_is_a_tenth_of_large_products(
    model: nn.Module, rows: int, words: list[str] | None
) -> None:
    advice = padding.padding_advice(padding.products_of(model), rows, per_replica=rows)
    assert (advice is None) == (words is None)
    assert all(word in (advice or "") for word in words or [])


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 300))
def test_sizes_that_fill_their_tiles_get_no_advice(outputs: int, inputs: int, rows: int) -> None:
    whole = padding.Product("w", outputs * 128, inputs * 128)
    assert padding.padding_advice([whole], rows * 8, rows * 8) is None
    ragged = padding.Product("w", outputs, inputs)
    assert ragged.padded >= ragged.useful


def test_products_are_the_matrices_that_activations_are_multiplied_with_each_once() -> None:
    model = nn.ModuleDict({"tokens": nn.Embedding(50, 16), "body": nn.Linear(16, 32), "norm": nn.LayerNorm(32)})
    head = nn.Linear(16, 50, bias=False)
    head.weight = model["tokens"].weight
    again = nn.Linear(16, 50, bias=False)
    again.weight = head.weight
    model.update({"head": head, "again": again})
    found = {(product.outputs, product.inputs) for product in padding.products_of(model)}
    assert found == {(32, 16), (50, 16)}
    assert len(padding.products_of(model)) == 2


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        ([torch.zeros(6, 784), torch.zeros(6)], 3),
        ([torch.zeros(6, dtype=torch.int64)], 3),
        ({"ids": torch.zeros(6, 50, dtype=torch.int64)}, 150),
        (torch.zeros(6, 50, 32), 150),
        ([], 3),
    ],
)
def test_rows_are_a_replicas_examples_times_their_positions(batch: Any, rows: int) -> None:
    assert padding.rows_of(batch, per_replica=3) == rows
