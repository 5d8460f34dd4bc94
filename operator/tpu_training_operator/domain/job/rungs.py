"""The ladder: which rung of `spec.ladder` a job is on, and the job as it is there.

The lower rungs make the first steps of the training as it would run on their slice, from scratch. The job itself is
the top rung, and the only one that may run on slices other than its own (`spec.placement`). Only the verdicts in the
status say which rung is next. A verdict is written together with the attempt that follows from it, so after a crash the
next operator continues on the same rung.

A lower rung keeps no checkpoint, unless the job continues it. Its folder is then outside the job's own, and different
for every attempt: nothing of a rung can be mistaken for the job's, and a repeated rung measures all of its steps.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tpu_training_operator.api.job import Checkpoint, TPUTrainingJob
from tpu_training_operator.api.ladder import Begin, Gates
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.slice import Hardware
from tpu_training_operator.api.status import RungStatus, RungVerdict
from tpu_training_operator.api.validation import InvalidJob, Problem
from tpu_training_operator.api.words import count, read_number
from tpu_training_operator.domain.job.choice import SliceChoice
from tpu_training_operator.domain.job.options import SliceOption, at_slice, broken_rules, with_spec
from tpu_training_operator.domain.job.recipe.checkpointing import rungs_folder
from tpu_training_operator.domain.job.recipe.resolve import JudgedSteps, LowerRung, resolve
from tpu_training_operator.domain.job.rung_losses import FEWEST_FOLLOWED
from tpu_training_operator.domain.job.topology import SliceLayout, layout_of

_NOISE_STEPS = 50
"""The steps over which the trainer averages a noise scale; one of fewer steps is mostly noise itself."""

_MOST_NOISE = 1e9
"""No gradient noise scale beyond has been measured: whatever reports one is wrong."""

_LEAST_EFFICIENCY = "0.5"
"""A slice of twice the chips that is no faster is not worth its price."""

FIRST_RUNG = 101
"""The number of the first rung among the slices of the job, far above those of alternatives."""


@dataclass(frozen=True)
class Rung:
    """`number` from 1, of `of` rungs. `options`: the slices that the rung may run on, in order of preference, each with
    the job as it is there; a lower rung has only one. `option`: the slice that it runs on."""

    number: int
    of: int
    options: tuple[SliceOption, ...]
    option: SliceOption

    @property
    def lower_rung(self) -> LowerRung | None:
        """How the rung shortens the job; None on the last rung, the job itself."""
        return self.option.resolution.lower_rung

    @property
    def words(self) -> str:
        return f"rung {self.number} of {self.of}"


def rung_of(
    options: Sequence[SliceOption], lower_rungs: Sequence[SliceOption], rungs: Sequence[RungStatus]
) -> Rung | None:
    """Returns the rung that the job is on, or begins with; None for a job without a ladder. `options`: the slices of
    the job itself. `rungs`: as in its status. On the last rung the option is the first, spec.slice."""
    if not lower_rungs:
        return None
    of, passed = len(lower_rungs) + 1, _count_passed(lower_rungs, rungs)
    if passed < len(lower_rungs):
        return Rung(passed + 1, of, (lower_rungs[passed],), lower_rungs[passed])
    last = rungs[passed - 1].attempt
    top_options = tuple(
        _continue_ladder(with_judged_steps(option, lower_rungs[-1], options[0]), last) for option in options
    )
    return Rung(of, of, top_options, top_options[0])


def _continue_ladder(option: SliceOption, last: int | None) -> SliceOption:
    """Returns the option for the job itself, which resumes from the last lower rung if the ladder says so. `last`: the
    attempt that made the rung's checkpoint."""
    job = option.job
    ladder, checkpoint = job.spec.ladder, job.spec.checkpoint
    if checkpoint is not None and last is not None and ladder is not None and ladder.begin is Begin.CHECKPOINT:
        # Not validated: the folder may be longer than the API allows people to write.
        fields = dict(checkpoint) | {"resume_from": f"{rungs_folder(job, checkpoint)}-{last}", "init_from": None}
        return replace(option, job=with_spec(job, checkpoint=Checkpoint.model_construct(**fields)))
    return option


@dataclass(frozen=True)
class RungNoise:
    """The gradient noise scale that a lower rung has measured. `value`: in examples."""

    value: str
    where: str

    @property
    def note(self) -> str:
        return f"gradientNoiseScale: {self.value}, measured on {self.where}"


def trusted_noise_scale(value: float | None, steps: int) -> str | None:
    """Returns the noise scale that a rung has measured in so many steps; None for one that no job should follow."""
    if value is None or steps < _NOISE_STEPS or not 1 <= value <= _MOST_NOISE:
        return None
    return f"{value:.4g}" if value < 1e4 else str(round(value))


def noise_of_rungs(rungs: Sequence[RungStatus]) -> RungNoise | None:
    """Returns the noise scale of the last lower rung that has passed and measured one. It changes only with a verdict,
    so never during an attempt."""
    found = None
    for number, rung in enumerate(rungs, 1):
        if rung.verdict is not RungVerdict.PASSED or rung.attempt is None:
            break
        if noise := trusted_noise_scale(read_number(rung.noise_scale), rung.steps):
            found = RungNoise(noise, f"rung {number}, {rung.slice}")
    return found


def with_noise_scale(body: Mapping[str, Any], noise: RungNoise) -> Mapping[str, Any] | None:
    """Returns the body of a job on a ladder, with the measured noise scale in its recipe; None for a job without a
    ladder, or whose user has set another one."""
    spec = body.get("spec")
    recipe = spec.get("recipe") if isinstance(spec, Mapping) else None
    if not isinstance(spec, Mapping) or not isinstance(recipe, Mapping) or spec.get("ladder") is None:
        return None
    if recipe.get("gradientNoiseScale") is not None:
        return None
    return {**body, "spec": {**spec, "recipe": {**recipe, "gradientNoiseScale": float(noise.value)}}}


def lower_rungs_of(job: TPUTrainingJob) -> tuple[SliceOption, ...]:
    """Returns the rungs below the job, the smallest first. Raises InvalidJob with the problems of all of them."""
    ladder = job.spec.ladder
    if ladder is None:
        return ()
    rungs: list[SliceOption] = []
    problems: list[Problem] = []
    for index in range(len(ladder.rungs)):
        try:
            rungs.append(_lower_rung(job, index))
        except InvalidJob as error:
            problems += error.problems
    if not problems:
        problems = [*_efficiency_problems(rungs), *_top_efficiency_problems(job, rungs[-1])]
    if problems:
        raise InvalidJob(problems)
    return tuple(_with_efficiency(rung, before) for rung, before in zip(rungs, (None, *rungs), strict=False))


def _with_efficiency(rung: SliceOption, before: SliceOption | None) -> SliceOption:
    """Returns the rung with the least efficiency that it has by default. Hosts that are processes of one machine share
    its cores, and are not expected to be faster together."""
    lower_rung = rung.resolution.lower_rung
    assert lower_rung is not None
    gates = _default_efficiency(lower_rung.gates, rung, before)
    return replace(rung, resolution=replace(rung.resolution, lower_rung=replace(lower_rung, gates=gates)))


def _default_efficiency(gates: Gates, rung: SliceOption, before: SliceOption | None) -> Gates:
    is_alike = before is not None and before.layout.shape.generation == rung.layout.shape.generation
    if not is_alike or gates.min_efficiency is not None or rung.choice.slice.hardware is Hardware.CPU:
        return gates
    return Gates.model_validate(dict(gates) | {"min_efficiency": _LEAST_EFFICIENCY})


def with_judged_steps(option: SliceOption, before: SliceOption, own: SliceOption) -> SliceOption:
    """Returns the job on one of its slices, with what its first steps must show. `before`: the last lower rung. `own`:
    the job on spec.slice."""
    ladder, resolution = option.job.spec.ladder, option.resolution
    assert ladder is not None
    gates = _default_efficiency(ladder.top.gates, option, before)
    # An alternative slice may have other chips, whose speed says nothing beside these.
    others = {"min_efficiency": before, "min_examples_per_second_per_chip": own}
    generation = option.layout.shape.generation
    apart = {gate: None for gate, other in others.items() if other.layout.shape.generation != generation}
    gates = Gates.model_validate(dict(gates) | apart)
    if all(gate in (None, False, "0") for gate in dict(gates).values()):
        return option
    steps = min(ladder.top.steps or before.resolution.steps, resolution.recipe.train_steps)
    return replace(option, resolution=replace(resolution, judged=JudgedSteps(steps, gates)))


def ladder_warnings(lower_rungs: Sequence[SliceOption], own: SliceOption) -> Iterator[str]:
    """Yields a warning for each rung that does not try the learning rate of its slice, or that is judged too early.
    `own`: the job on its own slice."""
    rungs = [*lower_rungs, *(with_judged_steps(own, rung, own) for rung in lower_rungs[-1:])]
    fields = [*(f"spec.ladder.rungs[{index}]" for index in range(len(lower_rungs))), "spec.ladder.top"]
    ladder = own.job.spec.ladder
    asked = [*(rung.steps for rung in ladder.rungs), ladder.top.steps or ladder.rungs[-1].steps] if ladder else []
    for field, option, wanted in zip(fields, rungs, asked, strict=False):
        if _trial(option) and wanted > (whole := option.resolution.recipe.train_steps):
            yield (
                f"{field}.steps: the training has only {count(whole, 'step')} on this slice, so the gates judge these"
                f" and not {wanted}; give fewer steps"
            )
    for field, option in zip(fields, rungs, strict=False):
        trial, warm_up = _trial(option), option.resolution.recipe.warmup_steps
        if trial and (steps := trial.steps) <= warm_up < option.resolution.recipe.train_steps:
            yield (
                f"{field}.steps: {count(steps, 'step')} end within the warm-up of {warm_up}, so the"
                f" rung does not try the full learning rate of its slice; {2 * warm_up} steps would"
            )
    for field, (before, option) in zip(fields[1:], pairwise(rungs), strict=False):
        trial, batch = _trial(option), option.resolution.recipe.batch.total
        examples = before.resolution.steps * before.resolution.recipe.batch.total
        if trial and trial.gates.loss_follows is not None and examples < FEWEST_FOLLOWED * batch:
            enough = -(-FEWEST_FOLLOWED * batch // before.resolution.recipe.batch.total)
            yield (
                f"{field}.gates.lossFollows: the rung before ends after {examples} examples,"
                f" {count(examples // batch, 'step')} of {batch}: too early to compare, because a larger batch lags by"
                f" some ten steps; with {enough} steps that rung has {FEWEST_FOLLOWED * batch} examples"
            )


def _trial(option: SliceOption) -> LowerRung | JudgedSteps | None:
    return option.resolution.lower_rung or option.resolution.judged


def _count_passed(lower_rungs: Sequence[SliceOption], rungs: Sequence[RungStatus]) -> int:
    """Counts the lower rungs that have passed, but not a verdict without an attempt, which is an edit by hand."""
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
    moved = with_spec(job, slice=rung.slice)
    if problems := list(broken_rules(job, moved, field)):
        raise InvalidJob(problems)
    try:
        resolution = resolve(job.spec, choice)
    except InvalidJob as error:
        raise InvalidJob([at_slice(problem, field) for problem in error.problems]) from None
    init_from = checkpoint.init_from if checkpoint else None
    is_continued = ladder.begin is Begin.CHECKPOINT and index == len(ladder.rungs) - 1
    lower_rung = LowerRung(
        steps=min(rung.steps, resolution.recipe.train_steps),
        gates=rung.gates,
        folder_prefix=rungs_folder(job, checkpoint) if checkpoint and (init_from is not None or is_continued) else None,
        init_from=init_from,
    )
    return SliceOption(choice, with_spec(moved, checkpoint=None), replace(resolution, lower_rung=lower_rung))


def _efficiency_problems(rungs: Sequence[SliceOption]) -> Iterator[Problem]:
    """Yields a problem for each rung whose minEfficiency compares two generations."""
    for index, (before, after) in enumerate(pairwise(rungs), 1):
        lower_rung = after.resolution.lower_rung
        if lower_rung and lower_rung.gates.min_efficiency is not None:
            yield from _generation_problems(f"spec.ladder.rungs[{index}]", before.layout, after.layout)


def _top_efficiency_problems(job: TPUTrainingJob, before: SliceOption) -> Iterator[Problem]:
    """Yields a problem if the job itself is to be compared with a rung of another generation; 0 turns the gate off."""
    ladder = job.spec.ladder
    assert ladder is not None
    if float(ladder.top.gates.min_efficiency or 0) > 0:
        yield from _generation_problems("spec.ladder.top", before.layout, layout_of(job.spec.slice, "spec.slice"))


def _generation_problems(rung: str, before: SliceLayout, after: SliceLayout) -> Iterator[Problem]:
    generations = before.shape.generation, after.shape.generation
    if generations[0] != generations[1]:
        yield Problem(
            f"{rung}.gates.minEfficiency",
            f"compares examples per second per chip, and {generations[1]} has other chips than {generations[0]},"
            " the generation of the rung before; leave it out, or use one generation",
        )
