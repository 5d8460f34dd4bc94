"""An event loop whose clock jumps to the next timer when nothing else is left to do, so that minutes take no time."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _VirtualTime(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        selector: Any = self._selector  # type: ignore[attr-defined]
        select = selector.select

        def jump(timeout: float | None) -> Any:
            if timeout is None:
                return select(None)
            self._now += timeout
            return select(0)

        selector.select = jump

    def time(self) -> float:
        return self._now


def run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=_VirtualTime) as runner:
        return runner.run(work)
