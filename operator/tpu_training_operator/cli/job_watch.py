"""A job and its pods, seen again whenever something changes. Used by `tpujob watch` and `tpujob logs --follow`."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from tpu_training_operator.domain.naming import gang_selector
from tpu_training_operator.kube.client import Client, Selection
from tpu_training_operator.kube.cluster import JOBS, PODS, JobKey, Object
from tpu_training_operator.kube.informer import Informer

T = TypeVar("T")

# The events of one moment are shown together: a gang of thousands starts in as many of them.
_SETTLE_SECONDS = 0.1


@dataclass(frozen=True)
class Seen(Generic[T]):
    """`job`: None when there is none of that name (any more). `trouble`: why the picture may be old."""

    job: Object | None
    pods: Mapping[str, T]
    trouble: str | None


async def watch_job(
    reader: Client, key: JobKey, keep_pod: Callable[[Object], T], tick_seconds: float
) -> AsyncGenerator[Seen[T], None]:
    """What there is, then once more after every change, and after `tick_seconds` without one: clocks go on.

    Raises ApiError where the cluster cannot be read to begin with.
    """
    changed = asyncio.Event()
    jobs = Informer(
        reader, Selection(JOBS, key.namespace, fields={"metadata.name": key.name}), lambda job: job, changed.set
    )
    pods = Informer(reader, Selection(PODS, key.namespace, gang_selector(key.name)), keep_pod, changed.set)
    tasks = [asyncio.create_task(watched.run()) for watched in (jobs, pods)]
    for task in tasks:
        task.add_done_callback(lambda _: changed.set())
    try:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), tick_seconds)
                await asyncio.sleep(_SETTLE_SECONDS)
            changed.clear()
            for task in tasks:
                if task.done():
                    # It ends by its failure only.
                    task.result()
            if jobs.is_listed and pods.is_listed:
                yield Seen(jobs.items.get(key.name), pods.items, jobs.trouble or pods.trouble)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
