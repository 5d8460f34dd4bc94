"""A user's own loop on two hosts that needs no torch: for stories about the operator, not about the training.

A worker of it costs a tenth of a second of CPU time where one with torch costs four. Host 0 reports with the function
in docs/progress.md.
"""

import os
import re
import signal
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

LASTING = "E2E_LASTING"
"""Name of the variable with the number of attempts that run until OPEN exists; later ones end after STEPS steps. By
default 1, the attempt that is hurt."""

HOARDING = "E2E_HOARDING"
"""Name of the variable with the host that uses up its memory in the first attempt."""

RAISING = "E2E_RAISING"
"""Name of the variable with the host whose loop raises an error."""

OPEN = Path("/tmp/open")
STEPS = 3
# The operator takes one report a second.
STEP_SECONDS = 1.0

_PAGE = Path(__file__).parents[2] / "docs" / "progress.md"


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    [reporter] = re.findall(r"```python\n(.*?)```", _PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(reporter, names)
    attempt = int(os.environ["TPUJOB_ATTEMPT"])
    lasts = attempt <= int(os.environ.get(LASTING, "1"))
    host = os.environ["TPUJOB_HOST_INDEX"]
    hoards = attempt == 1 and os.environ.get(HOARDING) == host
    for step in count(1):
        if OPEN.exists() or (step > STEPS and not lasts):
            return
        names["report"](step)
        time.sleep(STEP_SECONDS)
        if hoards and step == STEPS:
            hoard()
        if os.environ.get(RAISING) == host and step == STEPS:
            run_out_of_ink()


def hoard() -> None:
    """Allocates memory until the kernel kills the process."""
    taken = []
    while True:
        # Zeros would take no memory until they are written.
        taken.append(b"x" * 2**22)


def run_out_of_ink() -> NoReturn:
    raise ValueError("the pen has no ink")


if __name__ == "__main__":
    main()
