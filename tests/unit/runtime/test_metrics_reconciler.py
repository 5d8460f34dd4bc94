"""The reconciler tells of each status that was accepted, once, and of none that was not."""

from collections.abc import Mapping

import pytest

from tests.fakes.cluster import FakeCluster
from tests.unit.jobs import job_body
from tests.unit.pods import NOON
from tpu_training_operator.api.status import State, Status
from tpu_training_operator.kube.cluster import JOBS, JobKey
from tpu_training_operator.kube.errors import ApiError, Conflict, Unavailable
from tpu_training_operator.runtime.metrics import Metrics
from tpu_training_operator.runtime.reconciler import Reconciler

KEY = JobKey("default", "digits")


class Told(Metrics):
    """Writes down what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Status, Status]] = []
        self.states: list[State | None] = []
        self.gone: list[JobKey] = []

    def jobs_listed(self, states: Mapping[JobKey, State | None]) -> None:
        raise AssertionError("only who lists them can tell")

    def job_seen(self, key: JobKey, state: State | None, unready_seconds: float | None = None) -> None:
        self.states.append(state)

    def job_gone(self, key: JobKey) -> None:
        self.gone.append(key)

    def status_written(self, key: JobKey, before: Status, after: Status) -> None:
        self.steps.append((before, after))


@pytest.fixture
async def store() -> FakeCluster:
    store = FakeCluster()
    await store.create(job_body())
    return store


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def reconciler(store: FakeCluster, told: Told) -> Reconciler:
    return Reconciler(store, lambda: NOON, metrics=told)


async def test_a_written_status_is_counted_once(store: FakeCluster, told: Told, reconciler: Reconciler) -> None:
    await reconciler.reconcile(KEY)
    written = Status.read((await store.get(JOBS, KEY.namespace, KEY.name)).get("status"))
    assert told.steps == [(Status(), written)]
    assert told.states == [written.state]


async def test_a_pass_without_a_write_reports_only_the_state(told: Told, reconciler: Reconciler) -> None:
    for _ in range(3):
        await reconciler.reconcile(KEY)
    assert len(told.steps) == 1
    assert told.states == [State.STARTING] * 3


@pytest.mark.parametrize("refusal", [Conflict(409, "Conflict", "changed"), Unavailable(503, "", "overloaded")])
async def test_a_refused_status_is_not_counted(
    store: FakeCluster, told: Told, reconciler: Reconciler, refusal: ApiError
) -> None:
    store.faults["update_status TPUTrainingJob"] = refusal
    with pytest.raises(type(refusal)):
        await reconciler.reconcile(KEY)
    assert told.steps == []


async def test_a_deleted_job_is_reported(told: Told, reconciler: Reconciler) -> None:
    nobody = JobKey("default", "nobody")
    await reconciler.reconcile(nobody)
    assert told.gone == [nobody]
