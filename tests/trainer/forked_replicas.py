"""`python -m tpu_trainer` on a host of several processes, which are forked.

Spawned ones would import torch each, for three seconds; `test_backends` has the real command's.
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tpu_trainer.worker import entry


def _process(target: Any, args: Any) -> multiprocessing.Process:
    """Returns a process to be forked, whose arguments come to it as to a spawned one."""
    return multiprocessing.get_context("fork").Process(target=target, args=pickle.loads(pickle.dumps(args)))


@contextmanager
def forking() -> Iterator[None]:
    """Forks the processes that a host starts."""
    forks = SimpleNamespace(get_context=lambda _: SimpleNamespace(Process=_process))
    with mock.patch("tpu_trainer.worker.host.multiprocessing", forks):
        yield


def main() -> int:
    with forking():
        return entry.main()


if __name__ == "__main__":
    sys.exit(main())
