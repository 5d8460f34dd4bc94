"""The ladder: which rung of `spec.ladder` a job is on, and the job as it is there.

The lower rungs make the first steps of the training as it would run on their slice, from scratch. The job itself is
the top rung, and the only one that may run on slices other than its own (`spec.placement`). Only the verdicts in the
status say which rung is next. A verdict is written together with the attempt that follows from it, so after a crash the
next operator continues on the same rung.

A lower rung keeps no checkpoint, unless the job continues it. Then its place is outside the job's own folder and
different for every attempt: nothing of a rung can be mistaken for the job's, and a repeated rung measures all of its
steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tpu_training_operator.api.job import Checkpoint, Spec, TPUTrainingJob
from tpu_training_operator.api.ladder import Begin
from tpu_training_operator.api.status import RungStatus, RungVerdict
from tpu_training_operator.api.validation import InvalidJob, Problem
from tpu_training_operator.domain.job.choice import SliceChoice
from tpu_training_operator.domain.job.options import SliceOption, broken_there
from tpu_training_operator.domain.job.recipe.checkpointing import rungs_folder
from tpu_training_operator.domain.job.recipe.resolve import LowerRung, resolve

FIRST_RUNG = 101
"""The number of the first rung among the slices of the job, far above those of alternatives."""


@dataclass(frozen=True)
class Rung:
    """`number` from 1, of `of` rungs. `options`: the slices that it may run on, in order of preference, each with the
    job as it is there; a lower one has only one. `option`: the one that it runs on."""

    number: int
    of: int
    options: tuple[SliceOption, ...]
    option: SliceOption

    @property
    def lower_rung(self) -> LowerRung | None:
        """None on the last rung, the job itself."""
        return self.option.resolution.lower_rung

    @property
    def words(self) -> str:
        return f"rung {self.number} of {self.of}"


def rung_of(
    options: Sequence[SliceOption], lower_rungs: Sequence[SliceOption], rungs: Sequence[RungStatus]
) -> Rung | None:
    """The rung that the job is on, or begins with; None for a job without a ladder. `options`: the slices of the job
    itself. `rungs`: as in its status. On the last rung the option is the first, spec.slice."""
    if not lower_rungs:
        return None
    of, passed = len(lower_rungs) + 1, _passed(lower_rungs, rungs)
    if passed < len(lower_rungs):
        return Rung(passed + 1, of, (lower_rungs[passed],), lower_rungs[passed])
    last = rungs[passed - 1].attempt
    own = tuple(_continuing(option, last) for option in options)
    return Rung(of, of, own, own[0])


def _continuing(option: SliceOption, last: int | None) -> SliceOption:
    """The job there. If it is to continue the last lower rung, then with its checkpoint, which attempt `last` has
    made."""
    job = option.job
    ladder, checkpoint = job.spec.ladder, job.spec.checkpoint
    if checkpoint is not None and last is not None and ladder is not None and ladder.begin is Begin.CHECKPOINT:
        # Not validated: the added parts may make the place longer than the API allows people to write.
        given = dict(checkpoint) | {"resume_from": f"{rungs_folder(job, checkpoint)}-{last}", "init_from": None}
        resumed = Checkpoint.model_construct(**given)
        return replace(option, job=_with(job, checkpoint=resumed))
    return option


def lower_rungs_of(job: TPUTrainingJob) -> tuple[SliceOption, ...]:
    """The rungs below the job, the smallest first. Raises InvalidJob with the problems of all of them."""
    ladder = job.spec.ladder
    if ladder is None:
        return ()
    found: list[SliceOption] = []
    problems: list[Problem] = []
    for index in range(len(ladder.rungs)):
        try:
            found.append(_lower_rung(job, index))
        except InvalidJob as error:
            problems += error.problems
    if not problems:
        problems = list(_not_comparable(found))
    if problems:
        raise InvalidJob(problems)
    return tuple(found)


def _passed(lower_rungs: Sequence[SliceOption], rungs: Sequence[RungStatus]) -> int:
    """How many lower rungs have passed. A verdict without an attempt does not count: somebody has edited it."""
    passed = 0
    for rung in rungs[: len(lower_rungs)]:
        if rung.verdict is not RungVerdict.PASSED or rung.attempt is None:
            break
        passed += 1
    return passed


def _lower_rung(job: TPUTrainingJob, index: int) -> SliceOption:
    ladder, checkpoint = job.spec.ladder, job.spec.checkpoint
    assert ladder is not None
    rung, field = ladder.rungs[index], f"spec.ladder.rungs[{index}].slice"
    choice = SliceChoice(FIRST_RUNG + index, rung.slice, field, keeps_batch=False)
    there = _with(job, slice=rung.slice)
    # The ladder itself is about the job's own slice.
    if problems := list(broken_there(job, _with(there, ladder=None, placement=None), choice)):
        raise InvalidJob(problems)
    try:
        resolution = resolve(job.spec, choice)
    except InvalidJob as error:
        raise InvalidJob([_of_rung(problem, field) for problem in error.problems]) from None
    begins = checkpoint.init_from if checkpoint else None
    is_continued = ladder.begin is Begin.CHECKPOINT and index == len(ladder.rungs) - 1
    lower_rung = LowerRung(
        steps=min(rung.steps, resolution.recipe.train_steps),
        gates=rung.gates,
        folder=rungs_folder(job, checkpoint) if checkpoint and (begins is not None or is_continued) else None,
        init_from=begins,
    )
    return SliceOption(choice, _with(there, checkpoint=None), replace(resolution, lower_rung=lower_rung))


def _with(job: TPUTrainingJob, **changes: object) -> TPUTrainingJob:
    return TPUTrainingJob.model_validate(dict(job) | {"spec": Spec.model_validate(dict(job.spec) | changes)})


def _of_rung(problem: Problem, field: str) -> Problem:
    """At the path of the rung's slice, because the fields of the recipe are right for the job itself."""
    if problem.field.startswith(field):
        return problem
    return Problem(field, f"{problem.field}: {problem.message}")


def _not_comparable(lower_rungs: Sequence[SliceOption]) -> Iterator[Problem]:
    for index, (before, own) in enumerate(pairwise(lower_rungs), 1):
        generations = before.layout.shape.generation, own.layout.shape.generation
        lower_rung = own.resolution.lower_rung
        if lower_rung and lower_rung.gates.min_efficiency is not None and generations[0] != generations[1]:
            yield Problem(
                f"spec.ladder.rungs[{index}].gates.minEfficiency",
                f"compares examples per second per chip, and {generations[1]} has other chips than {generations[0]},"
                " the generation of the rung before; leave it out, or use one generation",
            )
