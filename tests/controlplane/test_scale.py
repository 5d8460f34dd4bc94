"""What a gang costs the API server, and how that grows with the gang. Counts only: seconds are for `make bench`."""

from concurrent.futures import Future

import pytest

from tests.controlplane.scale import JOBS, LARGE, SMALL, Attempt, Measured

# The first attempt: Service, two ConfigMaps, NetworkPolicy, EndpointSlice, two statuses. A restart keeps Service and
# NetworkPolicy, deletes the old ConfigMaps and EndpointSlice, and writes a third status when the old workers have given
# their chips back.
MOST_OTHER_WRITES = {"create": 7, "restart": 8}
# A fresh look at the gang before its addresses are written. A restart looks at what exists already, Service and
# NetworkPolicy, and at the job and its gang before it deletes and creates workers.
MOST_READS = {"create": 1, "restart": 6}
# Attempts run. One that replaces another also says why.
MOST_EVENTS = {"create": 1, "restart": 2}


@pytest.fixture(scope="module")
def measured(measurement: Future[Measured]) -> Measured:
    return measurement.result()


GANGS = [f"{kind} {hosts} hosts" for hosts in (SMALL, LARGE) for kind in ("create", "restart")]
ATTEMPTS = pytest.mark.parametrize("name", [*GANGS, f"create {JOBS} jobs"])


@pytest.fixture
def attempt(measured: Measured, name: str) -> Attempt:
    return measured.attempts[name]


@ATTEMPTS
def test_every_worker_is_created_once(attempt: Attempt) -> None:
    created, wanted = attempt.cost.creates, attempt.jobs * attempt.hosts
    assert created == wanted, attempt.requests


@ATTEMPTS
def test_an_attempt_takes_few_other_writes_whatever_its_size(attempt: Attempt) -> None:
    deletions = attempt.hosts if attempt.kind == "restart" else 0
    writes, most = attempt.cost.other_writes - deletions, attempt.jobs * MOST_OTHER_WRITES[attempt.kind]
    assert writes <= most, attempt.requests["operator"]


@ATTEMPTS
def test_an_attempt_takes_few_reads_whatever_its_size(attempt: Attempt) -> None:
    reads, most = attempt.cost.reads, attempt.jobs * MOST_READS[attempt.kind]
    assert reads <= most, attempt.requests["operator"]


@ATTEMPTS
def test_an_attempt_tells_of_its_beginning_and_of_its_run(attempt: Attempt) -> None:
    assert attempt.cost.events <= attempt.jobs * MOST_EVENTS[attempt.kind], attempt.requests["operator"]


@ATTEMPTS
def test_endpoints_are_written_a_handful_of_times_by_anybody(attempt: Attempt) -> None:
    """In the form that CoreDNS reads. A restart deletes the old ones before it."""
    writes, most = attempt.cost.endpoint_writes, attempt.jobs * (1 if attempt.kind == "create" else 2)
    assert writes <= most, attempt.requests


def test_a_gang_that_runs_costs_nothing(measured: Measured) -> None:
    assert measured.steady == {}


def test_an_operator_that_starts_beside_jobs_writes_nothing(measured: Measured) -> None:
    assert measured.start["writes"] == 0
