"""Stories that run at the same time, because they mostly wait. A test reads what became of its own one."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Group:
    """Stories by name, told in their order, so many of them at once. One that fails does not keep the next from it."""

    stories: Mapping[str, Callable[[], Any]]
    at_once: int = 1


class Stories:
    """By name."""

    def __init__(self, told: Mapping[str, Future[Any]]) -> None:
        self._told = told

    def end_of(self, name: str) -> Any:
        """Waits for it; returns or raises what the story has returned or raised."""
        return self._told[name].result()

    def wait(self) -> None:
        """Returns when all of them have ended, in whatever way."""
        wait(self._told.values())


@contextmanager
def told_together(*groups: Group) -> Iterator[Stories]:
    """At the end of the block no further story begins; those that have begun are awaited."""
    told: dict[str, Future[Any]] = {name: Future() for group in groups for name in group.stories}
    number = sum(group.at_once for group in groups)
    with ThreadPoolExecutor(max(1, number), thread_name_prefix="stories") as threads:
        for group in groups:
            left = iter(list(group.stories.items()))
            for _ in range(group.at_once):
                threads.submit(_tell, left, told)
        try:
            yield Stories(told)
        finally:
            for future in told.values():
                future.cancel()


def _tell(stories: Iterator[tuple[str, Callable[[], Any]]], told: Mapping[str, Future[Any]]) -> None:
    for name, story in stories:
        future = told[name]
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(story())
            # Also pytest.skip and the like; the test that asks for the result gets it.
            except BaseException as error:
                future.set_exception(error)


def selected(request: pytest.FixtureRequest, names: Iterable[str]) -> list[str]:
    """Those of the names that parametrize a selected test of the fixture's module, so that no other story is told."""
    items = [item for item in request.session.items if item.path == request.path]
    parameters = [getattr(getattr(item, "callspec", None), "params", {}).values() for item in items]
    wanted = {value for values in parameters for value in values if isinstance(value, str)}
    return [name for name in names if name in wanted]
