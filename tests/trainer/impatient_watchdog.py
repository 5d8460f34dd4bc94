"""`python -m tpu_trainer` whose watchdog looks often, and waits a moment only for a process that is told to stop."""

from __future__ import annotations

import sys

from tests.trainer.forked_replicas import main
from tpu_trainer.doctor import hang

hang._LONGEST_POLL = 0.05
hang.STOP_SECONDS = 0.2

if __name__ == "__main__":
    sys.exit(main())
