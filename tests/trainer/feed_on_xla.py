"""Prints how many programs an XLA device had run when the wait for a late batch began. Run by `test_backends`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event

import torch

from tests.trainer.barrier_on_xla import ended
from tpu_trainer.gang.backends.group import ProcessGroup
from tpu_trainer.gang.backends.xla import XlaHost


def main() -> None:
    backend = XlaHost(ProcessGroup(0, 1))
    large = backend.send(torch.full((1200, 1200), 1e-3))
    late = Event()

    def batches() -> Iterator[tuple[torch.Tensor, None]]:
        assert late.wait(60), "the feed has not waited for the device"
        yield torch.zeros(1), None

    @contextmanager
    def busy() -> Iterator[None]:
        yield
        print("finished:", ended(), "of 3")
        late.set()

    with backend.feed(batches(), busy) as fed:
        for _ in range(3):
            large = large @ large
            backend.sync()
        next(fed)


if __name__ == "__main__":
    main()
