"""What ends the work on all jobs, and what does not."""

import asyncio
from datetime import timedelta
from typing import cast

from tpu_training_operator.runtime.controller import Controller
from tpu_training_operator.runtime.keys import JobKey
from tpu_training_operator.runtime.reconciler import Reconciler

KEY = JobKey("team", "digits")


class Seen:
    """A reconciler that tells of its first pass."""

    def __init__(self) -> None:
        self.key: asyncio.Future[JobKey] = asyncio.get_running_loop().create_future()

    async def reconcile(self, key: JobKey) -> timedelta | None:
        self.key.set_result(key)
        return None


async def test_jobs_that_cannot_be_listed_do_not_end_the_work_on_those_that_are_hinted_at() -> None:
    listed, seen = asyncio.Event(), Seen()

    async def list_keys() -> list[JobKey]:
        listed.set()
        raise ValueError("a status that nobody understands")

    controller = Controller(cast("Reconciler", seen), list_keys, settle_seconds=0)
    running = asyncio.create_task(controller.run())
    await listed.wait()
    controller.hint(KEY)

    assert await asyncio.wait_for(seen.key, timeout=10) == KEY
    assert controller.is_running
    running.cancel()
    await asyncio.wait({running})
