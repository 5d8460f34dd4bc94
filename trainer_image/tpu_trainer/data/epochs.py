"""Map-style data that changes with the epoch: a curriculum, growing images, a new draw of negatives.

Examples are read ahead, by processes that have a copy of the dataset and never see a hook's changes to it. So the epoch
travels with the indices, and `set_epoch` is called where the examples are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils.data import ConcatDataset, Dataset, Subset

_PLAIN = (bool, int, float, str, type(None))


class Indices(list[int]):
    """The indices of a pass, which belong to one epoch."""

    def __init__(self, indices: Iterable[int], epoch: int) -> None:
        super().__init__(indices)
        self.epoch = epoch

    def __reduce__(self) -> Any:
        return Indices, (list(self), self.epoch)


class EpochDataset(Dataset[Any]):
    """A dataset with `set_epoch`, which is called before examples of another epoch are read."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._epoch: int | None = None

    def __getitems__(self, indices: Indices) -> Sequence[Any]:
        if indices.epoch != self._epoch:
            self._epoch = indices.epoch
            enter_epoch(self._dataset, indices.epoch)
        if (read := getattr(self._dataset, "__getitems__", None)) is not None:
            examples: Sequence[Any] = read(list(indices))
            return examples
        return [self._dataset[index] for index in indices]


def enter_epoch(dataset: Any, epoch: int) -> None:
    for part in with_epochs(dataset):
        part.set_epoch(epoch)


def with_epochs(dataset: Any) -> Iterator[Any]:
    """Finds the datasets with `set_epoch`: this one, or those inside torch's wrappers, which do not pass it on."""
    if callable(getattr(dataset, "set_epoch", None)):
        yield dataset
    else:
        for part in _wrapped(dataset):
            yield from with_epochs(part)


def _wrapped(dataset: Any) -> Iterator[Any]:
    """Yields the datasets inside torch's wrappers."""
    if isinstance(dataset, Subset):
        yield dataset.dataset
    elif isinstance(dataset, ConcatDataset):
        yield from dataset.datasets


def shares_epochs(train: Any, held_out: Any) -> bool:
    """Returns whether `set_epoch` on the train data changes the held-out data, too, as with two Subsets of one
    dataset."""
    return any(part is other for part in with_epochs(train) for other in with_epochs(held_out))


@contextmanager
def watch_attributes(dataset: Any, reads_here: bool, tell: Callable[[str], None]) -> Iterator[None]:
    """Warns of an attribute of a map-style dataset that hooks in the block have set. `reads_here`: this process reads
    the examples, too, and may count them meanwhile."""
    before = _attributes(dataset, reads_here)
    yield
    for place, value in _attributes(dataset, reads_here).items():
        if place in before and before[place] != value:
            tell(
                f"a hook has set the train dataset's {place[1]} to {value!r}, but examples are read ahead, possibly by "
                "workers with a copy of the dataset: some of this epoch may be read as before. Give the dataset "
                "set_epoch(epoch), which is called where they are read"
            )
            return


def _attributes(dataset: Any, reads_here: bool) -> dict[tuple[int, str], Any]:
    """Returns the dataset's plain attributes, by the dataset, which may be inside torch's wrappers, and the name."""
    if callable(getattr(dataset, "set_epoch", None)) or not hasattr(dataset, "__getitem__"):
        return {}
    plain = {name: value for name, value in getattr(dataset, "__dict__", {}).items() if type(value) in _PLAIN}
    attributes = {(id(dataset), name): value for name, value in plain.items() if "epoch" in name or not reads_here}
    for part in _wrapped(dataset):
        attributes |= _attributes(part, reads_here)
    return attributes
