"""The ladder: which rung of `spec.scaleUp` a job is on, and the job as it is there.

The stages are trials: the first steps of the training as it would run on their slice, from scratch. The job itself is
the top rung, and the only one that may run on slices other than its own (`spec.placement`). Only the verdicts in the
status say which rung is next. A verdict is written together with the attempt that follows from it, so after a crash the
next operator continues on the same rung.

A trial keeps no checkpoint, unless the job continues it. Then its place is outside the job's own folder and different
for every attempt: nothing of a trial can be mistaken for the job's, and a repeated trial measures all of its steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tpu_training_operator.api.job import Checkpoint, Spec, TPUTrainingJob
from tpu_training_operator.api.ladder import Begin
from tpu_training_operator.api.status import Stage, Verdict
from tpu_training_operator.api.validation import InvalidJob, Problem
from tpu_training_operator.domain.job.choice import Choice
from tpu_training_operator.domain.job.options import Option, broken_there
from tpu_training_operator.domain.job.recipe.checkpointing import trials_folder
from tpu_training_operator.domain.job.recipe.resolve import Trial, resolve

FIRST_TRIAL = 101
"""The number of the first stage among the slices of the job, far above those of alternatives."""


@dataclass(frozen=True)
class Rung:
    """`number` from 1, of `of` rungs. `options`: the slices that it may run on, in order of preference, each with the
    job as it is there; a trial has only one. `option`: the one that it runs on."""

    number: int
    of: int
    options: tuple[Option, ...]
    option: Option

    @property
    def trial(self) -> Trial | None:
        """None on the last rung, the job itself."""
        return self.option.resolution.trial

    @property
    def name(self) -> str:
        """As in `status.stage`."""
        return f"{self.number}/{self.of}"

    @property
    def words(self) -> str:
        return f"rung {self.number} of {self.of}"


def rung_of(options: Sequence[Option], trials: Sequence[Option], stages: Sequence[Stage]) -> Rung | None:
    """The rung that the job is on, or begins with; None for a job without a ladder. `options`: the slices of the job
    itself. `stages`: as in its status. On the last rung the option is the first, spec.slice."""
    if not trials:
        return None
    of, climbed = len(trials) + 1, _climbed(trials, stages)
    if climbed < len(trials):
        return Rung(climbed + 1, of, (trials[climbed],), trials[climbed])
    last = stages[climbed - 1].attempt
    own = tuple(_continuing(option, last) for option in options)
    return Rung(of, of, own, own[0])


def _continuing(option: Option, last: int | None) -> Option:
    """The job there. If it is to continue the last trial, then with its checkpoint, which attempt `last` has made."""
    job = option.job
    scale_up, checkpoint = job.spec.scale_up, job.spec.checkpoint
    if checkpoint is not None and last is not None and scale_up is not None and scale_up.begin is Begin.CHECKPOINT:
        # Not validated: the added parts may make the place longer than the API allows people to write.
        given = dict(checkpoint) | {"resume_from": f"{trials_folder(job, checkpoint)}-{last}", "init_from": None}
        resumed = Checkpoint.model_construct(**given)
        return replace(option, job=_with(job, checkpoint=resumed))
    return option


def trials_of(job: TPUTrainingJob) -> tuple[Option, ...]:
    """The rungs below the job, the smallest first. Raises InvalidJob with the problems of all of them."""
    scale_up = job.spec.scale_up
    if scale_up is None:
        return ()
    found: list[Option] = []
    problems: list[Problem] = []
    for index in range(len(scale_up.stages)):
        try:
            found.append(_trial(job, index))
        except InvalidJob as error:
            problems += error.problems
    if not problems:
        problems = list(_not_comparable(found))
    if problems:
        raise InvalidJob(problems)
    return tuple(found)


def _climbed(trials: Sequence[Option], stages: Sequence[Stage]) -> int:
    """How many trials have passed. A verdict without an attempt does not count: somebody has edited it."""
    climbed = 0
    for stage in stages[: len(trials)]:
        if stage.verdict is not Verdict.PASSED or stage.attempt is None:
            break
        climbed += 1
    return climbed


def _trial(job: TPUTrainingJob, index: int) -> Option:
    scale_up, checkpoint = job.spec.scale_up, job.spec.checkpoint
    assert scale_up is not None
    stage, field = scale_up.stages[index], f"spec.scaleUp.stages[{index}].slice"
    choice = Choice(FIRST_TRIAL + index, stage.slice, field, keeps_batch=False)
    there = _with(job, slice=stage.slice)
    # The ladder itself is about the job's own slice.
    if problems := list(broken_there(job, _with(there, scale_up=None, placement=None), choice)):
        raise InvalidJob(problems)
    try:
        resolution = resolve(job.spec, choice)
    except InvalidJob as error:
        raise InvalidJob([_of_rung(problem, field) for problem in error.problems]) from None
    begins = checkpoint.init_from if checkpoint else None
    is_continued = scale_up.begin is Begin.CHECKPOINT and index == len(scale_up.stages) - 1
    trial = Trial(
        steps=min(stage.steps, resolution.recipe.train_steps),
        gates=stage.gates,
        folder=trials_folder(job, checkpoint) if checkpoint and (begins is not None or is_continued) else None,
        init_from=begins,
    )
    return Option(choice, _with(there, checkpoint=None), replace(resolution, trial=trial))


def _with(job: TPUTrainingJob, **changes: object) -> TPUTrainingJob:
    return TPUTrainingJob.model_validate(dict(job) | {"spec": Spec.model_validate(dict(job.spec) | changes)})


def _of_rung(problem: Problem, field: str) -> Problem:
    """At the path of the rung's slice, because the fields of the recipe are right for the job itself."""
    if problem.field.startswith(field):
        return problem
    return Problem(field, f"{problem.field}: {problem.message}")


def _not_comparable(trials: Sequence[Option]) -> Iterator[Problem]:
    for index, (before, own) in enumerate(pairwise(trials), 1):
        generations = before.layout.shape.generation, own.layout.shape.generation
        trial = own.resolution.trial
        if trial and trial.gates.min_efficiency is not None and generations[0] != generations[1]:
            yield Problem(
                f"spec.scaleUp.stages[{index}].gates.minEfficiency",
                f"compares examples per second per chip, and {generations[1]} has other chips than {generations[0]},"
                " the generation of the rung before; leave it out, or use one generation",
            )
