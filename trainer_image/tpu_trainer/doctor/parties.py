"""Which replicas agree with each other, said in words."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import groupby


def odd_ones(values: Sequence[Hashable]) -> tuple[list[int], list[int]] | None:
    """The ranks that differ, and those they differ from: the largest party that agrees, of equal ones rank 0's.

    None where all agree. `values` are in the order of ranks, never empty.
    """
    parties: dict[Hashable, list[int]] = {}
    for rank, value in enumerate(values):
        parties.setdefault(value, []).append(rank)
    if len(parties) == 1:
        return None
    # max takes the first of equals, and rank 0's party is the first.
    majority = max(parties.values(), key=len)
    return [rank for rank in range(len(values)) if rank not in set(majority)], majority


def replicas(ranks: Sequence[int]) -> str:
    """ "replica 3", "replicas 0-2, 5"."""
    return f"replica{'s' if len(ranks) != 1 else ''} {ranges(ranks)}"


def ranges(numbers: Sequence[int]) -> str:
    """ "3", "0-2, 5": neighbours are drawn together, so that 256 of them fit on a line."""
    runs: list[str] = []
    for _, pairs in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in pairs]
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(runs)
