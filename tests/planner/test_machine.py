"""Everything that may meet in one job, under every order of events that hypothesis finds.

The machine is put together from `surroundings` and `gang`, which are there for every job, and from `moving`, `queued`,
`checked` and `careless`, each of which some jobs have: which ones is drawn for each job.
"""

from typing import Any

from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.planner.careless import CarelessGang
from tests.planner.checked import WAYS, CheckedGang
from tests.planner.gang import SOAK
from tests.planner.mishaps import ENDINGS, ENDS, FIRED, LOSSES, STARTS, TROUBLES
from tpu_contract.protocol import ReportPhase


class AnyGang(CheckedGang, CarelessGang):
    """A job with any of the features."""


# The short run is the same every time, so that what happens in it does not depend on luck; the long one is random.
# Many rounds of few lives each: within a round, hypothesis mutates lives that it had before, and 50 lives of two seeds
# hold as many different mishaps as 200 of one.
SETTINGS: Any = settings(
    max_examples=5000 if SOAK else 25,
    stateful_step_count=100 if SOAK else 50,
    derandomize=not SOAK,
    database=None,
)
LEAST_ROUNDS, MOST_ROUNDS = (1, 3) if SOAK else (6, 16)
EXPECTED = (
    *(*ENDINGS, *STARTS, *LOSSES, *TROUBLES, *ENDS, *WAYS),
    *(f"report: {phase}" for phase in ReportPhase),
    *(f"a move: {reason}" for reason in ("NoCapacity", "Lost", "Better", "NotAdmitted")),
    *("a placement lost", "fewer slices", "examples saved", "the budget trained", "a rung Passed", "a rung Failed"),
    *("an eviction", "quota for two slices", "a Workload deleted", "quota given back", "an attempt after an eviction"),
    *(
        "a check",
        "a job that the check has failed",
        "EntryCheckPassed: EntryPassed",
        "EntryCheckPassed: EntryNotChecked",
    ),
    *("a field edited", "a job that cannot be read", "an attempt restored", "a status wiped", "a condition lost"),
    "other workers",
    *("a worker without its label", "a worker without its owner"),
)


def test_no_order_of_events_breaks_any_job_and_every_event_has_happened() -> None:
    FIRED.clear()
    for number in range(MOST_ROUNDS):
        # The seed, because without one any edit of the machine's text draws other lives.
        run_state_machine_as_test(seed(number)(AnyGang), settings=SETTINGS)
        missing = [what for what in EXPECTED if not FIRED[what]]
        if not missing and number + 1 >= LEAST_ROUNDS:
            return
    raise AssertionError(f"these have not happened once: {missing}; the others: {dict(FIRED)}")
