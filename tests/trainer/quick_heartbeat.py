"""`python -m tpu_trainer` that reports twenty times a second, so that a test waits for nothing but what it is about.

A slow machine changes nothing: the service is waited for as long as a test lasts, unless the test says how long.
The processes that a host starts import this module again, under a name that multiprocessing gives it, and must be
patched, too; a test that imports it for the two names must not.
"""

from __future__ import annotations

import os
import sys

from tests.trainer.forked_replicas import main
from tests.trainer.gang_processes import DEADLINE
from tpu_trainer.reporting import heartbeat

TIMEOUT, LAST = "TEST_TIMEOUT", "TEST_LAST"
"""Seconds for a report, and for the last one."""

if __name__ in ("__main__", "__mp_main__"):
    heartbeat.EVERY_SECONDS = 0.05
    heartbeat.LONGEST_SECONDS = 0.2
    heartbeat.TIMEOUT_SECONDS = float(os.environ.get(TIMEOUT, DEADLINE))
    heartbeat.LAST_SECONDS = float(os.environ.get(LAST, DEADLINE))

if __name__ == "__main__":
    sys.exit(main())
