"""Whose pass is next where many tenants want one: the real Controller and queue, in virtual time, with passes that all
take the same, or those of one tenant much longer. What a job needs is a number of passes; a failed gang restarts until
its last one."""

import asyncio
from collections.abc import Iterable
from datetime import timedelta
from typing import cast

import pytest

from tests.unit.virtual_time import run
from tpu_training_operator.kube.cluster import JobKey
from tpu_training_operator.runtime.controller import Controller, Haste
from tpu_training_operator.runtime.reconciler import Reconciler

PASS_SECONDS = 0.05
WORKERS = 16
FAILED = JobKey("team-b", "failed")
NEWCOMER = JobKey("team-b", "new")
# Decide, stop the old gang, publish names, create workers, see them run.
PASSES_OF_A_RESTART = 5


def jobs(number: int, namespace: str) -> list[JobKey]:
    return [JobKey(namespace, f"job-{n}") for n in range(number)]


class Passes:
    """`left`: how many more passes each job needs, one by default; `restarting`: until then they are restarts. `slow`:
    namespaces whose passes never end."""

    def __init__(
        self,
        left: dict[JobKey, int],
        restarting: Iterable[JobKey] = (),
        pause: float = 0.0,
        slow: Iterable[str] = (),
    ) -> None:
        self.left = left
        self.restarting = set(restarting)
        self.pause = pause
        self.slow = set(slow)
        self.order: list[JobKey] = []

    async def reconcile(self, key: JobKey, *, follows: bool = False) -> timedelta | None:
        self.order.append(key)
        await asyncio.sleep(float("inf") if key.namespace in self.slow else PASS_SECONDS)
        self.left[key] = self.left.get(key, 1) - 1
        if self.left[key] > 0:
            return timedelta(seconds=self.pause)
        self.restarting.discard(key)
        return None

    def is_restarting(self, key: JobKey) -> bool:
        return key in self.restarting

    def settle_seconds(self, key: JobKey) -> float:
        return 0.0

    def wrote(self, key: JobKey, version: str) -> bool:
        return False

    def of(self, key: JobKey) -> list[int]:
        """The numbers of its passes, of all passes."""
        return [number for number, taken in enumerate(self.order) if taken == key]


def worked(
    passes: Passes, hints: Iterable[tuple[JobKey, Haste]], *, listed: Iterable[JobKey] = (), seconds: float = 30
) -> Passes:
    async def work() -> None:
        async def list_jobs() -> list[JobKey]:
            return list(listed)

        controller = Controller(cast("Reconciler", passes), list_jobs, settle_seconds=0.0, workers=WORKERS)
        running = asyncio.create_task(controller.run())
        await asyncio.sleep(0.001)
        for key, haste in hints:
            controller.enqueue(key, haste)
        await asyncio.sleep(seconds)
        running.cancel()
        await asyncio.wait({running})

    run(work())
    return passes


@pytest.mark.parametrize("pause", [0.0, 0.2], ids=["at once", "later"])
@pytest.mark.parametrize("namespace", ["team-a", "team-b"], ids=["of others", "of its own tenant"])
def test_all_passes_of_a_restart_go_before_a_thousand_new_jobs(pause: float, namespace: str) -> None:
    hints = [*((key, Haste.NOW) for key in jobs(1000, namespace)), (FAILED, Haste.FIRST)]
    passes = worked(Passes({FAILED: PASSES_OF_A_RESTART}, [FAILED], pause), hints)
    assert len(passes.of(FAILED)) == PASSES_OF_A_RESTART
    # Each waits until a worker is free, at the most.
    rounds = PASSES_OF_A_RESTART * (2 + pause / PASS_SECONDS)
    assert passes.of(FAILED)[-1] <= rounds * WORKERS


def test_what_somebody_has_changed_goes_first_to_its_end() -> None:
    changed = JobKey("team-a", "changed")
    hints = [*((key, Haste.NOW) for key in jobs(1000, "team-a")), (changed, Haste.FIRST)]
    assert worked(Passes({changed: 3}), hints).of(changed)[-1] <= 2 * 3 * WORKERS


def test_a_tenant_whose_thousand_jobs_fail_again_and_again_holds_up_nobody() -> None:
    crashing = jobs(1000, "team-a")
    hints = [*((key, Haste.FIRST) for key in crashing), (FAILED, Haste.FIRST), (NEWCOMER, Haste.NOW)]
    passes = worked(Passes({FAILED: PASSES_OF_A_RESTART} | dict.fromkeys(crashing, 10**6), [*crashing, FAILED]), hints)
    assert passes.of(FAILED)[-1] <= 2 * PASSES_OF_A_RESTART * WORKERS
    assert passes.of(NEWCOMER)[0] <= 2 * WORKERS


def test_one_new_job_does_not_wait_for_a_thousand_of_another_tenant() -> None:
    hints = [*((key, Haste.NOW) for key in jobs(1000, "team-a")), (NEWCOMER, Haste.NOW)]
    assert worked(Passes({}), hints).of(NEWCOMER)[0] <= 2 * WORKERS


def test_in_the_background_tenants_take_turns() -> None:
    listed = [*jobs(1000, "team-a"), *jobs(3, "team-b"), *jobs(3, "team-c")]
    passes = worked(Passes({}), [], listed=listed, seconds=60)
    others = [number for key in listed[1000:] for number in passes.of(key)]
    assert sorted(others) == [1, 2, 4, 5, 7, 8]
    assert set(passes.order) == set(listed)


@pytest.mark.parametrize("haste", [Haste.NOW, Haste.FIRST])
@pytest.mark.parametrize("number", [1, 3])
def test_tenants_whose_passes_take_for_ever_leave_workers_to_others(number: int, haste: Haste) -> None:
    slow = [f"slow-{n}" for n in range(number)]
    hints = [*((key, haste) for namespace in slow for key in jobs(100, namespace)), (NEWCOMER, Haste.NOW)]
    passes = worked(Passes({NEWCOMER: PASSES_OF_A_RESTART}, slow=slow), hints)
    assert len(passes.of(NEWCOMER)) == PASSES_OF_A_RESTART


def test_in_the_background_a_tenant_whose_passes_take_for_ever_leaves_a_worker_to_others() -> None:
    listed = [*jobs(100, "slow"), *jobs(20, "team-b")]
    passes = worked(Passes({}, slow=["slow"]), [], listed=listed)
    assert set(listed[100:]) <= set(passes.order)
