"""The metrics over whole lives of jobs agree with the final status."""

import pytest

from tests.planner import kubelet
from tests.planner.model_cluster import ModelCluster
from tests.planner.operators import KEY, one_pass
from tests.planner.story import all_are_ready, all_finish, fails, given_a_job, passes
from tests.unit.scrape import counted, value
from tpu_contract.protocol import ReportPhase
from tpu_training_operator.api.status import State
from tpu_training_operator.runtime.metrics import Metrics


class Life:
    """A job and the metrics of its operator."""

    def __init__(self, cluster: ModelCluster) -> None:
        self.cluster = cluster
        self.metrics = Metrics()

    def goes_on(self, seconds: float = 0) -> None:
        """Lets the time pass, then reconciles until nothing is left to do."""
        passes(self.cluster, seconds)
        for _ in range(5):
            kubelet.sweep(self.cluster)
            before = self.cluster.status
            one_pass(self.cluster)
            if self.cluster.status != before:
                self.metrics.status_written(KEY, before, self.cluster.status)

    def gets_ready(self, seconds: float) -> None:
        self.goes_on(seconds)
        all_are_ready(self.cluster)
        self.goes_on()

    def reports(self, step: int, *, checkpoint_step: int | None = None) -> None:
        kubelet.report(self.cluster, step, ReportPhase.TRAINING, total_steps=300, checkpoint_step=checkpoint_step)
        self.goes_on()

    def suspends(self, suspend: bool) -> None:
        self.cluster.edit_run_policy(suspend=suspend)
        self.goes_on()

    def spent(self) -> dict[str, float]:
        return counted(self.metrics, "tpujob_goodput_seconds_total", "account")

    def seen(self, histogram: str) -> tuple[float, float]:
        """Count and sum of the histogram."""
        return value(self.metrics, f"{histogram}_count"), value(self.metrics, f"{histogram}_sum")


@pytest.fixture
def life() -> Life:
    """A job whose gang became ready 90 seconds after its creation."""
    life = Life(given_a_job({"spec.checkpoint": {"uri": "gs://bucket/digits"}}, listens=True))
    life.goes_on()
    life.gets_ready(90)
    assert life.cluster.status.state is State.RUNNING
    return life


def fails_and_recovers(life: Life, seconds: float) -> None:
    attempt = life.cluster.status.attempt
    fails(life.cluster, f"digits-{attempt}-0-1")
    life.goes_on()
    life.gets_ready(seconds)
    assert (life.cluster.status.state, life.cluster.status.attempt) == (State.RUNNING, attempt + 1)


def test_a_resumption_counts_as_a_start(life: Life) -> None:
    life.suspends(True)
    life.goes_on(1000)
    life.suspends(False)
    life.gets_ready(20)
    assert life.seen("tpujob_gang_ready_seconds") == (2, 90 + 20)


def test_a_failed_recovery_is_part_of_the_next_one(life: Life) -> None:
    fails(life.cluster, "digits-1-0-1")
    life.goes_on()
    passes(life.cluster, 30)
    kubelet.start(life.cluster, life.cluster.pods["digits-2-0-0"])
    fails(life.cluster, "digits-2-0-0")
    life.goes_on()
    life.gets_ready(300)
    assert life.cluster.status.attempt == 3
    assert life.seen("tpujob_recovery_seconds") == (1, 330)


def test_restarts_and_failures_are_counted_as_in_the_status(life: Life) -> None:
    for seconds in (10, 500, 1000):
        fails_and_recovers(life, seconds)
    assert life.cluster.status.restarts.by_class == {"Infrastructure": 3}
    assert counted(life.metrics, "tpujob_restarts_total", "class") == {"Infrastructure": 3}
    assert counted(life.metrics, "tpujob_failures_total", "class") == {"Infrastructure": 3}


def test_a_failure_that_ends_the_job_is_not_counted_as_a_restart(life: Life) -> None:
    fails(life.cluster, "digits-1-0-0", 1)
    life.goes_on()
    assert life.cluster.status.state is State.FAILED
    assert counted(life.metrics, "tpujob_failures_total", "class") == {"UserError": 1}
    assert counted(life.metrics, "tpujob_restarts_total", "class") == {}
    assert counted(life.metrics, "tpujob_restarts_exhausted_total", "class") == {"UserError": 1}
    assert counted(life.metrics, "tpujob_finished_total", "reason") == {"NotRetryable": 1}


def test_the_counted_time_adds_up_to_the_life_of_the_job(life: Life) -> None:
    """With a checkpoint, a failure, a suspension and lost training."""
    life.reports(10)
    passes(life.cluster, 200)
    life.reports(20, checkpoint_step=20)
    passes(life.cluster, 100)
    life.reports(30, checkpoint_step=20)
    fails_and_recovers(life, 40)
    life.reports(21, checkpoint_step=20)
    life.goes_on(50)
    life.suspends(True)
    life.goes_on(1000)
    life.suspends(False)
    life.gets_ready(20)
    life.reports(30, checkpoint_step=21)
    passes(life.cluster, 60)
    all_finish(life.cluster)
    life.goes_on()

    status = life.cluster.status
    assert status.state is State.SUCCEEDED
    goodput = status.goodput
    assert goodput.chip_seconds is not None
    assert goodput.wasted > 0
    assert life.spent() == {account: seconds for account, seconds in goodput.by_account.items() if seconds}
    assert value(life.metrics, "tpujob_goodput_ratio_sum") == float(goodput.ratio or 0)
    assert sum(counted(life.metrics, "tpujob_chip_seconds_total", "account").values()) == goodput.chip_seconds.total
    assert value(life.metrics, "tpujob_chip_budgets_exceeded_total") == 0


def test_a_job_that_is_out_of_chip_hours_is_counted_once(life: Life) -> None:
    life.cluster.edit_run_policy(budget={"chipHours": 1, "onExceeded": "Fail"})
    life.goes_on(500)
    assert life.cluster.status.state is State.FAILED
    assert value(life.metrics, "tpujob_chip_budgets_exceeded_total") == 1
    assert counted(life.metrics, "tpujob_finished_total", "reason") == {"BudgetExceeded": 1}
