"""The digest of a program from its text: the same in a worker and in the compile check.

A digest has two parts, "LARGE-ALL". The first covers what makes a program large: its arguments and results, matrix
products, convolutions and collectives. The second covers every operation. torch_xla makes a few operations in another
way on a TPU than where the check traces them, so programs with equal first parts are alike even if the second differ.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator

from tpu_contract.protocol import ProgramMatch

_LARGE = ("func.func", "dot_general", "convolution", "all_reduce", "all_gather", "reduce_scatter", "tpu_custom_call")
_SUMS = ('"stablehlo.all_reduce"', '"stablehlo.reduce_scatter"')
# A TPU lays out arrays in another way than a CPU, and both name values in the order in which they are made.
_LAYOUTS = re.compile(r'(, )?\b(xla_shape|\w+_layouts?) = ("[^"]*"|dense<[^>]*> : tensor<[^>]*>|\[[^=]*?\](?=[,}]))')
_VALUE = re.compile(r"%[\w#:]+")


def digest_of(stablehlo: str) -> str:
    """Returns the digest of a program from its text."""
    # The module's name has a number in it.
    _, *lines = _LAYOUTS.sub("", stablehlo).replace("{, ", "{").replace(" {}", "").splitlines()
    large = sorted(_VALUE.sub("%", line).strip() for line in _large(lines))
    return f"{_hash(large)}-{_hash(lines)}"


def compare(own: str, checked: str) -> ProgramMatch:
    """Returns how the program of one digest is that of another."""
    if own == checked:
        return ProgramMatch.SAME
    return ProgramMatch.ALIKE if own.partition("-")[0] == checked.partition("-")[0] else ProgramMatch.OTHER


def _large(lines: Iterable[str]) -> Iterator[str]:
    is_sum = False
    for line in lines:
        if any(name in line for name in _LARGE) or (is_sum and "}) : (" in line):
            yield line
            # The types of a sum stand behind its region.
            is_sum = any(name in line for name in _SUMS)


def _hash(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
