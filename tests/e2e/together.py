"""Jobs of several modules that are told at the same time. A module names its own in STORIES."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.object_storage import ObjectStorage
from tests.e2e.space import Space, a_space
from tests.stories import Group, Stories, told_together

# Starting a worker with torch takes four seconds of CPU time. With more of them a healthy one would seem to hang.
TRAININGS_AT_ONCE = max(2, (os.cpu_count() or 1) - 1)
OTHERS_AT_ONCE = 4


@dataclass(frozen=True)
class Story:
    """`trains`: whether its workers import torch. `stores`: whether it needs the object storage."""

    tell: Callable[[Cluster, ObjectStorage], Any]
    trains: bool = False
    stores: bool = True

    @classmethod
    def of_a_space(cls, told: Callable[[Space], None]) -> "Story":
        """One that needs a namespace only."""

        def tell(cluster: Cluster, _: ObjectStorage) -> None:
            with a_space(cluster) as space:
                told(space)

        return cls(tell, stores=False)


def stories_of(items: list[pytest.Item]) -> dict[str, Story]:
    """All of the modules of these tests."""
    modules = {item.path: getattr(item, "module", None) for item in items}
    found: dict[str, Story] = {}
    for module in modules.values():
        own: Mapping[str, Story] = getattr(module, "STORIES", {})
        assert not found.keys() & own.keys()
        found |= own
    return found


@contextmanager
def all_told(stories: Mapping[str, Story], cluster: Cluster, storage: ObjectStorage | None) -> Iterator[Stories]:
    """Without a storage those that need one are skipped."""

    def tell(story: Story) -> Any:
        if story.stores and storage is None:
            pytest.skip("needs a storage beside the nodes; this cluster is somebody else's")
        return story.tell(cluster, storage)

    def group(trains: bool, at_once: int) -> Group:
        chosen = {name: story for name, story in stories.items() if story.trains == trains}
        return Group({name: partial(tell, story) for name, story in chosen.items()}, at_once)

    with told_together(group(True, TRAININGS_AT_ONCE), group(False, OTHERS_AT_ONCE)) as told:
        yield told
