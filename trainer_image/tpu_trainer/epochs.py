"""Map-style data that changes with the epoch: a curriculum, growing images, a new draw of negatives.

Examples are read ahead, by processes that have a copy of the dataset and never see what a hook does to it. So the epoch
goes with the indices, and `set_epoch` is called where they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils.data import ConcatDataset, Dataset, Subset

_PLAIN = (bool, int, float, str, type(None))


class Indices(list[int]):
    """Those of a pass, which belong to one epoch."""

    def __init__(self, indices: Iterable[int], epoch: int) -> None:
        super().__init__(indices)
        self.epoch = epoch

    def __reduce__(self) -> Any:
        return Indices, (list(self), self.epoch)


class OfEpochs(Dataset[Any]):
    """A dataset with `set_epoch`, which is called before examples of another epoch are read."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._epoch: int | None = None

    def __getitems__(self, indices: Indices) -> Sequence[Any]:
        if indices.epoch != self._epoch:
            self._epoch = indices.epoch
            enter_epoch(self._dataset, indices.epoch)
        if (read := getattr(self._dataset, "__getitems__", None)) is not None:
            found: Sequence[Any] = read(list(indices))
            return found
        return [self._dataset[index] for index in indices]


def enter_epoch(dataset: Any, epoch: int) -> None:
    for part in with_epochs(dataset):
        part.set_epoch(epoch)


def with_epochs(dataset: Any) -> Iterator[Any]:
    """The datasets with `set_epoch`: this one, or those in torch's own wrappers, which do not pass it on."""
    if callable(getattr(dataset, "set_epoch", None)):
        yield dataset
    elif isinstance(dataset, Subset):
        yield from with_epochs(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from with_epochs(part)


@contextmanager
def noticed(dataset: Any, reads_here: bool, tell: Callable[[str], None]) -> Iterator[None]:
    """Around hooks: tells of an attribute of a map-style dataset that they have set. `reads_here`: this process reads
    the examples, too, and may count them meanwhile."""
    before = _attributes(dataset, reads_here)
    yield
    for name, value in _attributes(dataset, reads_here).items():
        if name in before and before[name] != value:
            tell(
                f"a hook has set the train dataset's {name} to {value!r}, and its examples are read ahead, by workers "
                "with a copy of it if there are any: those of this epoch may be read as before. Give the dataset "
                "set_epoch(epoch), which is called where they are read"
            )
            return


def _attributes(dataset: Any, reads_here: bool) -> dict[str, Any]:
    if any(with_epochs(dataset)) or not hasattr(dataset, "__getitem__"):
        return {}
    own = {name: value for name, value in getattr(dataset, "__dict__", {}).items() if type(value) in _PLAIN}
    return {name: value for name, value in own.items() if "epoch" in name or not reads_here}
