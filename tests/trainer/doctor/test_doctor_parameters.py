"""The parameters' checksums: equal for equal bits, on every device, and for nothing else that happens by accident."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.gang_processes import Launcher
from tpu_trainer.doctor.agreement import checksums
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.gang.gather import gather_whole

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.bool,
]
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_of(dtype: torch.dtype, seed: int = 1, size: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (10 * torch.randn(size, generator=generator)).to(dtype)


@given(st.sampled_from(DTYPES[:6]), st.integers(0, 11), st.integers(0, 63), st.integers(0, 2**20))
def test_one_flipped_bit_changes_the_checksum(dtype: torch.dtype, element: int, bit: int, seed: int) -> None:
    before = tensor_of(dtype, seed)
    after = before.clone()
    size = 4 if dtype.is_complex else before.element_size()
    bits = (torch.view_as_real(after) if dtype.is_complex else after).view(_BITS[size])
    flip = 1 << (bit % (8 * size))
    # The highest bit alone is the most negative number.
    bits.view(-1)[element] ^= flip - (1 << 8 * size) if flip == 1 << (8 * size - 1) else flip
    sums = [checksums([tensor_of(torch.float32), tensor]) for tensor in (before, after)]
    assert (sums[0] != sums[1]).tolist() == [False, True]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_tensors_have_equal_checksums_however_they_lie_in_memory(dtype: torch.dtype) -> None:
    tensor = tensor_of(dtype).reshape(3, 4)
    transposed = tensor.t().contiguous().t()
    assert checksums([tensor]).tolist() == checksums([transposed]).tolist()


def test_minus_zero_and_two_kinds_of_nan_are_differences() -> None:
    zeros = torch.zeros(4), torch.tensor([0.0, -0.0, 0.0, 0.0])
    assert checksums([zeros[0]]).tolist() != checksums([zeros[1]]).tolist()


class Float32Wire:
    """Carries rows as float32 numbers, as every backend does."""

    def gather(self, row: list[float]) -> list[list[float]]:
        return [torch.tensor(row, dtype=torch.float32).tolist()]


@given(st.lists(st.integers(-(2**31), 2**32 - 1), min_size=1, max_size=8))
def test_whole_numbers_survive_the_float32_rows_they_travel_in(values: list[int]) -> None:
    assert gather_whole(values, cast("Backend", Float32Wire())) == [values]


def test_xla_has_the_same_checksums_without_a_transfer_to_the_cpu(launcher: Launcher) -> None:
    assert launcher.run_on_xla("tests.trainer.checksums_on_xla").endswith("equal\n")
