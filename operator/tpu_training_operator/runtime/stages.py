"""Carries out the stages of a plan in pages.

Between two pages the caller may look whether the job still wants the rest: the stage of a large gang takes minutes. A
stage ends early where it is refused, or where several requests in a row fail: the rest would fare no better.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from tpu_training_operator.domain.actions import (
    Action,
    AskForStacks,
    Create,
    DeleteConfigMap,
    DeleteJob,
    DeletePod,
    LookAtEvents,
)
from tpu_training_operator.domain.lifecycle.blocked import Obstacle

_PAGE = 64
_FAILURES_IN_A_ROW = 3


class Refused(Exception):
    """An action that will be refused again until somebody changes something. `sure`: it is no passing moment of the
    API server's. `kind`: of the object that was refused."""

    def __init__(self, obstacle: Obstacle, kind: str, *, sure: bool = True) -> None:
        super().__init__(obstacle.message)
        self.obstacle = obstacle
        self.kind = kind
        self.sure = sure


class _Stage:
    """One stage under way, and whether it ends early."""

    def __init__(self, act: Callable[[Action], Awaitable[None]], side_by_side: int, done: Counter[str]) -> None:
        self._act = act
        self._limit = asyncio.Semaphore(side_by_side)
        self._done = done
        self._refused = False
        self._failures = 0

    async def page(self, actions: Sequence[Action]) -> None:
        results = await asyncio.gather(*map(self._one, actions), return_exceptions=True)
        if errors := [result for result in results if isinstance(result, BaseException)]:
            # What cannot heal by itself is what a person must hear of first.
            raise next((error for error in errors if isinstance(error, Refused)), errors[0])

    async def _one(self, action: Action) -> None:
        async with self._limit:
            if self._refused or self._failures >= _FAILURES_IN_A_ROW:
                return
            try:
                await self._act(action)
            except Exception as error:
                self._refused = self._refused or isinstance(error, Refused)
                self._failures += 1
                raise
            self._failures = 0
            self._done[_verb(action)] += 1


async def carry_out(
    stage: Sequence[Action],
    act: Callable[[Action], Awaitable[None]],
    is_still_wanted: Callable[[], Awaitable[bool]],
    side_by_side: int,
    done: Counter[str],
) -> bool:
    """`act` on all actions of the stage, so many at a time, counting them in `done` by what they are. False where the
    rest was not wanted any more. Raises what an action raised, a refusal before anything else."""
    work = _Stage(act, side_by_side, done)
    for start in range(0, len(stage), _PAGE):
        if start and not await is_still_wanted():
            return False
        await work.page(stage[start : start + _PAGE])
    return True


def _verb(action: Action) -> str:
    match action:
        case Create(body):
            return f"create {body['kind']}"
        case DeletePod(force=force):
            return "delete Pod by force" if force else "delete Pod"
        case DeleteConfigMap():
            return "delete old ConfigMap"
        case DeleteJob():
            return "delete finished job"
        case AskForStacks():
            return "ask for stacks"
        case LookAtEvents():
            return "look at events"
