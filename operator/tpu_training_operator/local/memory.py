"""How many of a job's processes this machine can hold: a slice of 64 hosts would take 40 GB of memory."""

import re
from collections.abc import Iterator
from pathlib import Path

from tpu_training_operator.api.catalogue import generations
from tpu_training_operator.domain.job.topology import SliceLayout

GB_PER_PROCESS = 0.7
"""A process of the trainer that has imported torch and torch_xla and trains the digits (measured: 0.62 GB)."""

_CGROUP = Path("/sys/fs/cgroup")


def free_gb() -> float | None:
    """Memory that processes can still get, within the container's limit if there is one; None if nothing tells."""
    return min(_limits(), default=None)


def largest_that_fits(layout: SliceLayout, processes: int) -> str | None:
    """The largest accelerator type of the same generation with at most so many hosts; None if none is small enough."""
    generation = generations().get(layout.shape.generation)
    if generation is None:
        return None
    fitting = [shape for shape in generation.shapes if shape.default and shape.hosts <= processes]
    return max(fitting, key=lambda shape: shape.chips).accelerator_type if fitting else None


def _limits() -> Iterator[float]:
    try:
        found = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
        if found:
            yield int(found[1]) * 1024 / 1e9
        most, used = ((_CGROUP / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        if most != "max":
            yield max(0.0, (int(most) - int(used)) / 1e9)
    except (OSError, ValueError):
        return
