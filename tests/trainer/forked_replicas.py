"""`python -m tpu_trainer` on a host of several processes, which are forked.

Spawned ones would import torch each, for three seconds; `test_backends` has the real command's.
"""

from __future__ import annotations

import multiprocessing
import sys
from unittest import mock

from tpu_trainer.worker import entry


def main() -> int:
    forks = multiprocessing.get_context("fork")
    with mock.patch("tpu_trainer.worker.host.multiprocessing.get_context", return_value=forks):
        return entry.main()


if __name__ == "__main__":
    sys.exit(main())
