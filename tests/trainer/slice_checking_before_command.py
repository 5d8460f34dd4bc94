"""`python -m tpu_trainer slice-check fast COMMAND...`, as the operator starts it before a loop of the user's own."""

from __future__ import annotations

import os
import sys

from tpu_trainer.checks.slice.command import main

if __name__ == "__main__":
    command = [sys.executable, "-c", "print('the command'); raise SystemExit(7)"]
    sys.exit(main([os.environ["TEST_SLICE_CHECK"], *command]))
