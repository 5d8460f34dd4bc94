"""The operator is killed again and again during a job whose workers die too: nothing is lost or done twice. First one
that is alone, then whichever of two leads."""

import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.object_storage import ObjectStorage
from tests.cluster.processes import wait_until
from tests.e2e import containers
from tests.e2e.chronicle import Recoveries, recovery
from tests.e2e.operator_pod import BACK_SECONDS, kill_leader, kill_operator, restarts, transitions, two_operators
from tests.e2e.own_loop import LASTING, OPEN
from tests.e2e.training import HOSTS, NAME, OWN_LOOP, START_SECONDS, Training, started

# Long runs: `make soak`.
SOAK = os.environ.get("SOAK") == "1"
SEEDS = range(10) if SOAK else range(1)
OPERATOR_KILLS = 12 if SOAK else 2
LEADER_KILLS = 20 if SOAK else 2
WORKER_KILLS = 2
# Counted from when its process appears; it needs about two seconds to begin its work.
LONGEST_LIFE_SECONDS = 5.0

# The job must not end before the operator has died for the last time.
ENV = {LASTING: str(WORKER_KILLS + 1)}


@pytest.mark.parametrize("seed", SEEDS)
def test_an_operator_that_is_killed_again_and_again_restarts_each_gang_once(
    cluster: Cluster,
    alone: None,
    storage: ObjectStorage,
    recoveries: Recoveries,
    seed: int,
) -> None:
    chosen = random.Random(seed)
    lives = [chosen.uniform(0, LONGEST_LIFE_SECONDS) for _ in range(OPERATOR_KILLS)]
    terms = [chosen.uniform(0, LONGEST_LIFE_SECONDS) for _ in range(LEADER_KILLS)]
    hosts = [chosen.randrange(HOSTS) for _ in range(WORKER_KILLS)]
    before = restarts(cluster)
    with started(cluster, storage, env=ENV, **OWN_LOOP) as training, ThreadPoolExecutor(1) as beside:
        alone = beside.submit(kill_operator_after, cluster, lives)
        kill_worker(training, 1, hosts[0])
        alone.result()
        # The kubelet counts a death when it starts the next process.
        wait_until(
            lambda: restarts(cluster) - before >= OPERATOR_KILLS, timeout=BACK_SECONDS, what="the operator is back"
        )
        died = restarts(cluster) - before
        with two_operators(cluster):
            led = transitions(cluster)
            leading = beside.submit(kill_leader_after, cluster, terms)
            for attempt, host in enumerate(hosts[1:], start=2):
                kill_worker(training, attempt, host)
            leading.result()
            took_over = transitions(cluster) - led
            training.wait_attempt(WORKER_KILLS + 1)
            for host in range(HOSTS):
                training.kubectl("exec", f"{NAME}-{WORKER_KILLS + 1}-0-{host}", "--", "touch", str(OPEN))
            status = training.wait_ended()
    for attempt in range(2, WORKER_KILLS + 2):
        recoveries[f"worker killed, operator too ({seed}.{attempt - 1})"] = recovery(training.chronicle, attempt)

    attempts = range(1, WORKER_KILLS + 2)
    assert died == OPERATOR_KILLS
    # More, if the API server was too slow for a leader.
    assert took_over >= LEADER_KILLS
    assert training.chronicle.attempts() == list(attempts)
    assert training.chronicle.created() == [f"{NAME}-{n}-0-{host}" for n in attempts for host in range(HOSTS)]
    assert status["restarts"]["byClass"] == [{"class": "Infrastructure", "count": WORKER_KILLS}]
    assert status["state"] == "Succeeded"


def kill_operator_after(cluster: Cluster, lives: list[float]) -> None:
    for life in lives:
        kill_operator(cluster, after=life)


def kill_leader_after(cluster: Cluster, terms: list[float]) -> None:
    for term in terms:
        kill_leader(cluster, after=term)


def kill_worker(training: Training, attempt: int, host: int) -> None:
    """Once all workers of the attempt are ready."""
    training.wait_attempt(attempt)
    containers.kill(training.pod(host, attempt))
    training.chronicle.wait(
        lambda told: told.status() if told.status()["attempt"] > attempt else None,
        timeout=START_SECONDS,
        what="the next attempt has begun",
    )
