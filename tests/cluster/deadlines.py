"""How long a test waits. A loaded machine is slow and not wrong, so the limits grow with its load."""

import os
from pathlib import Path

LONGEST_STRETCH = 6.0
"""A limit grows to this many times its length and no further: a test that waits in vain has to end."""


def deadline(seconds: float) -> float:
    """The seconds, multiplied by the load of each core at this moment."""
    return seconds * min(max(1.0, load_per_core()), LONGEST_STRETCH)


def patience(seconds: float) -> int:
    """Returns how long a test's job waits before it gives up on nodes that are free: a loaded scheduler needs more than
    a second to find them."""
    return round(deadline(seconds))


def kubectl_timeout(seconds: float) -> str:
    """The flag of kubectl and helm for a deadline."""
    return f"--timeout={deadline(seconds):.0f}s"


def load_per_core() -> float:
    """The average of the last minute, or the processes that want to run now if they are more."""
    return max(os.getloadavg()[0], _runnable()) / (os.cpu_count() or 1)


def _runnable() -> int:
    """The fourth field of /proc/loadavg (proc_loadavg(5)); 0 where there is none."""
    try:
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    except OSError:
        return 0
