"""Features of a recipe and of a task, each crossed with each other: every job trains as plain PyTorch does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.trainer import whole_runs
from tests.trainer.crossings.covering import allowed, covering, fits, tuples
from tests.trainer.crossings.expected import Ended, expected
from tests.trainer.crossings.features import FEATURES, KNOWN, RULES, SOAK, WAYS, Case, Rule, cases, refused
from tests.trainer.crossings.legs import legs
from tests.trainer.crossings.running import Job, run_all
from tests.trainer.crossings.task import Model, task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

CLOSE = {"Float32": 2e-5, "BFloat16Mixed": 2e-3, "BFloat16": 2e-3}
"""How far a job may be from plain PyTorch, which computes in float64 for Float32."""

ALIKE = 1e-4
"""How far a tensor may be from the reference's, in proportion to its length."""

ROUGH = 4e-2
"""The same for bfloat16 where operations are not PyTorch's own, one by one, and round elsewhere."""


def close(case: Case) -> float:
    apart = case.way != "torch" or case.optimizer == "adafactor" or case.sharding == "sharded"
    rough = case.precision != "Float32" and apart
    return ROUGH if rough else CLOSE[case.precision]


class Jobs:
    """The jobs of the tests that were asked for; those of one way are made together, when the first is needed."""

    def __init__(self, asked: list[Case], directory: Callable[[str], Path]) -> None:
        self._asked, self._directory = asked, directory
        self._made: dict[Case, Job] = {}

    def __getitem__(self, case: Case) -> Job:
        if case not in self._made:
            alike = [other for other in self._asked if other.way == case.way]
            self._made |= run_all(alike, self._directory(case.way))
        return self._made[case]


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    names = [item.name for item in request.session.items if item.path == request.path]
    asked = [case for case in cases() if any(f"[{case.name}]" in name for name in names)]
    return Jobs(asked, tmp_path_factory.mktemp)


@pytest.mark.parametrize("case", sorted(cases(), key=lambda case: WAYS.index(case.way)), ids=lambda case: case.name)
def test_a_job_trains_as_plain_pytorch(jobs: Jobs, case: Case) -> None:
    assert_trains_as_plain_pytorch(case, jobs[case])


def assert_trains_as_plain_pytorch(case: Case, job: Job) -> None:
    assert not job.trouble, job.trouble
    for number, (run, want) in enumerate(zip(job.runs, expected(case), strict=True)):
        found = list(differences(case, run.ended(), want))
        assert not found, f"run {number}: " + "; ".join(found[:6])
    assert_loads_as_documented(case, job.runs[-1].ended())


def assert_loads_as_documented(case: Case, ended: Ended) -> None:
    """A weight that is used in two places is stored under one name."""
    missing, unexpected = Model(case).load_state_dict(ended.weights | ended.average, strict=False)
    assert (set(missing), unexpected) == ({"again.weight"}, [])


def differences(case: Case, found: Ended, want: Ended) -> Iterator[str]:
    """Yields where a run's end is not what it must be."""
    limit = close(case)
    for step, loss in want.losses.items():
        if (there := found.losses.get(step)) is None or loss is None:
            if there is not loss:
                yield f"loss of step {step}: {there}, not {loss}"
        elif abs(there - loss) > limit:
            yield f"loss of step {step}: {there:.6f}, not {loss:.6f}"
    for step, rates in want.rates.items():
        there = found.rates.get(step)
        if there is None and want.losses[step] is None:
            continue
        # AdaScale's are measured, in the job's own precision.
        measured = case.scaling == "adaptive" and case.precision != "Float32"
        if there is None or there != pytest.approx(rates, rel=limit if measured else 1e-5):
            yield f"rates of step {step}: {there}, not {rates}"
    # A run may begin with the evaluation that the one before it still owed.
    evaluations = {step: value for step, value in found.evaluations.items() if step in want.losses}
    if evaluations != pytest.approx(want.evaluations, abs=limit):
        yield f"evaluations: {evaluations}, not {want.evaluations}"
    for what in ("weights", "average", "state"):
        yield from _apart(what, getattr(found, what), getattr(want, what), case)


def _apart(what: str, found: dict[str, Tensor], want: dict[str, Tensor], case: Case) -> Iterator[str]:
    for name, value in want.items():
        if name.endswith("/step") and name not in found:
            continue
        if name not in found:
            yield f"{what}: no {name}"
            continue
        # Infinities are what they are; a NaN is far off.
        there, value = found[name].double().nan_to_num(nan=1e9), value.double().nan_to_num()
        # Adam makes a whole step of what rounding leaves of a gradient of zero: one element in thirty may be apart.
        apart = (there - value).abs().flatten().sort().values
        distance = (apart[: len(apart) - len(apart) // 30].norm() / value.norm().clamp(min=1e-9)).item()
        # Lion makes a whole step of a sign that rounding turns. Among the hundreds of the soak a few others round twice
        # as far, too; of these, Float32 agrees.
        rounds_far = SOAK or (case.optimizer == "lion" and close(case) == ROUGH)
        if not distance <= max(close(case), ALIKE) * (2 if rounds_far else 1):
            yield f"{what}: {name} is {distance:.2g} off"


@pytest.mark.parametrize("strength", [2, 3])
def test_every_allowed_tuple_of_values_of_a_small_set_occurs(strength: int) -> None:
    features = {name: FEATURES[name][-3:] for name in ("way", "replicas", "sharding", "optimizer", "used")}
    forbidden = [rule.values for rule in RULES if rule.values.keys() <= features.keys()]
    begin = [{"way": "spmd", "used": "idle", "optimizer": "nadam", "sharding": "whole"}]

    def search() -> list[dict[str, str]]:
        return covering(features, forbidden, strength, begin, cost=lambda row: len(row["way"]), changes=100)

    rows = search()
    found = {each for row in rows for each in tuples(row, strength)}
    assert found == set(allowed(features, forbidden, strength))
    assert all(fits(row, forbidden) for row in rows)
    assert any(begin[0].items() <= row.items() for row in rows)
    assert search() == rows


def test_every_pair_of_values_meets_in_a_job_or_is_forbidden_with_a_reason() -> None:
    rows = [case.row for case in cases()]
    found = {each for row in rows for each in tuples(row, 2)}
    forbidden = {frozenset(rule.values.items()) for rule in RULES}
    every = set(allowed(FEATURES, [], 2))
    assert every - found == forbidden
    assert all(rule.why for rule in RULES)


def test_what_has_failed_together_is_in_a_job() -> None:
    rows = [case.row for case in cases()]
    assert all(any(known.items() <= row.items() for row in rows) for known in KNOWN)


def test_the_jobs_have_names_of_their_own() -> None:
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("rule", "case"), refused(), ids=lambda one: one.name if isinstance(one, Case) else "")
def test_what_the_trainer_cannot_do_is_refused(tmp_path: Path, rule: Rule, case: Case) -> None:
    if case.way == "spmd":
        job = run_all([case], tmp_path)[case]
        outcomes = [(o["code"], str(o["message"])) for run in job.runs for o in run.outcomes.values()]
    else:
        spec = legs(case)[0].spec(tmp_path)
        ran = whole_runs.run(lambda hp, rank: task(hp), int(case.replicas), recipe=spec.pop("optimizer"), **spec)
        outcomes = [(o.code.name, o.message) for o in ran.outcomes]
    assert {code for code, _ in outcomes} == {"UserError"}
    assert all(str(rule.says) in message for _, message in outcomes)
