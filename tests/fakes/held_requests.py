"""Requests that the test answers one by one, so that it sees which are under way and which is next. No time passes."""

import asyncio

from tpu_training_operator.kube.errors import ApiError
from tpu_training_operator.kube.turns import Turns


class HeldRequests:
    """`sent`: the names of the requests whose turn has come, in order."""

    def __init__(self, turns: Turns | None = None) -> None:
        self.turns = turns or Turns()
        self.sent: list[str] = []
        self._under_way: list[asyncio.Future[None]] = []

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    async def send(self, name: str, method: str = "POST") -> None:
        async with self.turns.turn(method):
            self.sent.append(name)
            answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._under_way.append(answer)
            await answer

    async def answer(self, error: ApiError | None = None, *, position: int = 0) -> None:
        """Answers the request that has waited longest, or another one."""
        self.answer_unsettled(error, position)
        await settle()

    def answer_unsettled(self, error: ApiError | None = None, position: int = 0) -> None:
        """Nobody has run on the answer when it returns."""
        answer = self._under_way.pop(position)
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(None)

    async def answer_all(self, *, leaving: int = 0) -> None:
        while self.under_way > leaving:
            await self.answer(position=leaving)


async def settle() -> None:
    """Returns when every task that can run has run."""
    for _ in range(20):
        await asyncio.sleep(0)
