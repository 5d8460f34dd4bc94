"""Estimates how many processes of a job fit into this machine's memory: a slice of 64 hosts would take 40 GB."""

import re
from collections.abc import Iterator
from pathlib import Path

from tpu_training_operator.api.catalogue import generations
from tpu_training_operator.domain.job.topology import SliceLayout

GB_PER_PROCESS = 0.7
"""The memory of a trainer process with torch and torch_xla that trains the digits (measured: 0.62 GB)."""

_CGROUP = Path("/sys/fs/cgroup")


def free_gb() -> float | None:
    """Returns the memory that is free, within the container's limit if there is one; None if unknown."""
    return min(_limits(), default=None)


def largest_that_fits(layout: SliceLayout, hosts: int) -> str | None:
    """Returns the largest accelerator type of the generation with at most `hosts` hosts; None if none is as small."""
    generation = generations().get(layout.shape.generation)
    if generation is None:
        return None
    fitting = [shape for shape in generation.shapes if shape.default and shape.hosts <= hosts]
    return max(fitting, key=lambda shape: shape.chips).accelerator_type if fitting else None


def _limits() -> Iterator[float]:
    try:
        match = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
        if match:
            yield int(match[1]) * 1024 / 1e9
        most, used = ((_CGROUP / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        if most != "max":
            yield max(0.0, (int(most) - int(used)) / 1e9)
    except (OSError, ValueError):
        return
