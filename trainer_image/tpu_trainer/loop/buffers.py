"""Gives all replicas rank 0's buffers for each step.

Buffers get no gradient, so nothing keeps them equal: each replica's own examples change a codebook, a queue or a
running centre. As with `broadcast_buffers` in torch's DistributedDataParallel, the buffers that a forward pass may read
are rank 0's at the start of every step. No step reads the running statistics of norms in training mode. They stay each
replica's own until they are read: in evaluation mode, by an evaluation, or for a checkpoint.

So a run computes the same with and without evaluations, and with and without a restart, which begins with the
checkpoint's buffers on all replicas. A buffer that has not changed since it was sent is not sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from tpu_trainer.doctor.last_weights import tensor_checksum
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.gang.gather import checksum, is_shared

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_LOOK_EVERY = 100
"""Steps between two comparisons of values, which find writes that torch does not count as changes (`.data`)."""

State = tuple[Tensor, int]
"""A buffer and torch's count of its changes."""


@dataclass(frozen=True)
class BufferPlace:
    """A buffer's module and name; the module may replace the tensor."""

    module: nn.Module
    name: str
    is_statistic: bool

    @property
    def tensor(self) -> Tensor:
        tensor = self.module._buffers[self.name]
        assert tensor is not None
        return tensor

    @property
    def is_there(self) -> bool:
        return self.module._buffers.get(self.name) is not None

    @property
    def is_read(self) -> bool:
        """Returns whether a forward pass in training may read the buffer."""
        return not (self.is_statistic and self.module.training)

    @property
    def state(self) -> State:
        tensor = self.tensor
        return tensor, -1 if tensor.is_inference() else tensor._version


def find_places(model: nn.Module) -> list[BufferPlace]:
    places = [
        BufferPlace(module, name, isinstance(module, _NormBase) and name in _STATISTICS and _is_torchs(module))
        for module in model.modules()
        for name in module._buffers
    ]
    # A buffer that several modules share is sent once.
    return list({id(place.tensor): place for place in places if place.is_there}.values())


class Buffers:
    """Keeps the buffers of one replica's model, which is on its device before the first step. All methods are
    collectives."""

    def __init__(self, model: nn.Module, backend: Backend) -> None:
        self._model, self._backend = model, backend
        self._shared = backend.terms > 1
        self._places: list[BufferPlace] = []
        self._sent: dict[BufferPlace, State] = {}
        self._sums: dict[BufferPlace, int] = {}
        self._steps = 0
        # Buffers that are sent in every step: all of them, where the host cannot learn for free what others changed.
        self._moving: set[BufferPlace] = set()
        self._sends_all = not (backend.one_program or backend.reads_free)

    def step_begins(self, aside: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Replaces by rank 0's the buffers that the step's first forward pass, which follows, may read. `aside`: a
        context for an exchange, which is entered only if there may be something to send."""
        if not self._shared:
            return
        step, self._steps = self._steps, self._steps + 1
        if step < 2:
            with aside():
                self._places = self._find_common()
        read = [place for place in self._places if place.is_there and place.is_read]
        for place in self._sent.keys() - set(read):
            del self._sent[place]
        looks = step == 1 or step % _LOOK_EVERY == 0
        if read and (looks or not self._backend.one_program or any(map(self._changed, read))):
            with aside():
                if looks:
                    self._look(read)
                self._send([place for place, wanted in zip(self._places, self._must_send(), strict=True) if wanted])

    def share(self) -> None:
        """Replaces all buffers by rank 0's, as they will be in a run that continues from a checkpoint of this step."""
        if self._shared and (places := self._find_common()):
            self._send(places)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Replaces all buffers by rank 0's while the block runs. Afterwards each replica has its own again, except for
        buffers that the block has changed."""
        places = self._find_common() if self._shared else []
        values = [place.tensor.detach().clone() for place in places]
        self._backend.broadcast([place.tensor for place in places])
        lent = [place.state for place in places]
        yield
        if places:
            with torch.no_grad():
                for place, value, (tensor, version) in zip(places, values, lent, strict=True):
                    # Rank 0 has nothing to restore, unless all replicas must run the same program.
                    keeps = self._backend.rank == 0 and not self._backend.one_program
                    if place.is_there and place.state == (tensor, version) and not keeps:
                        tensor.copy_(value)
            self._backend.sync()

    def _find_common(self) -> list[BufferPlace]:
        """Finds the buffers that all replicas have. A forward pass may register buffers on one replica alone; these are
        never exchanged."""
        places = find_places(self._model)
        names = ",".join(f"{type(place.module).__name__}.{place.name}" for place in places)
        return places if is_shared(names, self._backend) else [place for place in self._places if place.is_there]

    def _changed(self, place: BufferPlace) -> bool:
        if not (place.is_there and place.is_read):
            return False
        if self._sends_all or place in self._moving or place not in self._sent:
            return True
        (sent, then), (tensor, now) = self._sent[place], place.state
        return sent is not tensor or then != now

    def _must_send(self) -> list[bool]:
        """Returns for each place whether to send it: a replica has changed it, and all have it in one shape."""
        changed = [self._changed(place) for place in self._places]
        if self._sends_all or self._backend.one_program:
            return changed
        shapes = [_shape(place.tensor) if place.is_there else 1.0 for place in self._places]
        rows = self._backend.gather([shape if new else -shape for shape, new in zip(shapes, changed, strict=True)])
        return [max(column) > 0 and len({abs(value) for value in column}) == 1 for column in zip(*rows, strict=True)]

    def _send(self, places: Sequence[BufferPlace]) -> None:
        if not places:
            return
        self._backend.broadcast([place.tensor for place in places])
        self._sent |= {place: place.state for place in places if place.is_read}

    def _look(self, read: Sequence[BufferPlace]) -> None:
        """Finds buffers whose value has changed and whose count of changes has not, to send them in every step from now
        on."""
        if self._sends_all:
            return
        now = self._checksums(read)
        moved = [float(place in now and self._sums.get(place, now[place]) != now[place]) for place in self._places]
        # On some replicas a value may have stayed by chance.
        for place, *column in zip(self._places, *self._backend.gather(moved), strict=True):
            if any(column):
                self._moving.add(place)
        self._sums |= now

    def _checksums(self, places: Sequence[BufferPlace]) -> dict[BufferPlace, int]:
        with torch.no_grad():
            sums = torch.stack([tensor_checksum(place.tensor) for place in places])
        self._backend.sync()
        (here,) = self._backend.to_host([sums])
        return dict(zip(places, here.tolist(), strict=True))


def _is_torchs(module: nn.Module) -> bool:
    """Returns whether the module's forward pass is torch's own: another one may read the statistics in training."""
    return str(type(module).forward.__module__).partition(".")[0] == "torch"


def _shape(tensor: Tensor) -> float:
    """Returns a hash of type and shape: a number above 0 that float32 holds exactly."""
    return 1 + checksum(f"{tensor.dtype} {list(tensor.shape)}".encode()) // 2
