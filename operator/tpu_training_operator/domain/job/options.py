"""Every slice that a job may run on, with the job as it runs there, or why the slice cannot be used.

A job is checked for all its slices before it starts, so that a mistake does not surface at the first move, days later.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tpu_training_operator.api.catalogue import generations
from tpu_training_operator.api.job import Spec, TPUTrainingJob
from tpu_training_operator.api.model import ApiModel
from tpu_training_operator.api.placement import MoveBatch
from tpu_training_operator.api.slice import Formation, ProvisioningType
from tpu_training_operator.api.validation import InvalidJob, Problem
from tpu_training_operator.api.words import count
from tpu_training_operator.domain.job.choice import SliceChoice, alternatives, fewer_slices, own_choice
from tpu_training_operator.domain.job.recipe.resolve import Resolution, resolve
from tpu_training_operator.domain.job.topology import SliceLayout, layout_of

_MOST_NEAREST = 3
MOST_COUNTS = 16
"""Numbers of slices below spec.slice.count that one job is checked for."""


@dataclass(frozen=True)
class SliceOption:
    """A choice and what it resolves to. `job`: the job with this slice as its spec.slice, so that other code need not
    know of moves."""

    choice: SliceChoice
    job: TPUTrainingJob
    resolution: Resolution

    @property
    def number(self) -> int:
        return self.choice.number

    @property
    def is_own(self) -> bool:
        """Whether the choice is spec.slice, or fewer slices of it."""
        return self.choice.is_own

    @property
    def layout(self) -> SliceLayout:
        return self.resolution.layout

    @property
    def program(self) -> tuple[str, str, int, int]:
        """The key of the step's program, which depends on the slice's shape and a replica's batch."""
        shape, batch = self.layout.shape, self.resolution.recipe.batch
        return shape.generation, shape.topology, batch.per_replica, batch.accumulation

    def __str__(self) -> str:
        """Names the layout, and how the slice is provisioned, unless on demand: that tells two of one shape apart."""
        provisioning = self.choice.slice.provisioning
        if provisioning is not None and provisioning.reservation:
            return f"{self.layout} (reservation {provisioning.reservation.rpartition('reservations/')[2]})"
        how = _PROVISIONING_TEXTS.get(provisioning.type) if provisioning else None
        how = how or _FORMATION_TEXTS.get(self.choice.slice.formation)
        return f"{self.layout} ({how})" if how else str(self.layout)


_PROVISIONING_TEXTS = {
    ProvisioningType.SPOT: "spot",
    ProvisioningType.FLEX_START: "flex-start",
    ProvisioningType.QUEUED: "queued",
}


_FORMATION_TEXTS = {Formation.SUB_SLICE: "sub-slice", Formation.DYNAMIC_SLICE: "dynamic slice"}


def other_programs(first: SliceOption, others: Iterable[SliceOption]) -> list[SliceOption]:
    """Returns the options whose step is another program than that of `first`, one for each program."""
    by_program = {first.program: first}
    for option in others:
        by_program.setdefault(option.program, option)
    return list(by_program.values())[1:]


def options_of(job: TPUTrainingJob) -> tuple[SliceOption, ...]:
    """Returns the slices in order of preference, spec.slice first. Raises InvalidJob with the problems of all."""
    resolution = resolve(job.spec)
    options, problems = [SliceOption(own_choice(job.spec), job, resolution)], list[Problem]()
    counts = list(_counts(job.spec, resolution, problems))
    for choice in (*fewer_slices(job.spec, counts), *alternatives(job.spec, len(counts) + 1)):
        moved = with_spec(job, slice=choice.slice)
        problems += broken_rules(job, moved, choice.field)
        try:
            option = SliceOption(choice, moved, resolve(job.spec, choice))
        except InvalidJob as error:
            problems += [at_slice(problem, choice.field, _hint(problem, job, choice)) for problem in error.problems]
            continue
        problems += _repetitions(option, options)
        options.append(option)
    if problems:
        raise InvalidJob(problems)
    return tuple(options)


def _repetitions(option: SliceOption, before: list[SliceOption]) -> Iterator[Problem]:
    """Yields a problem if an earlier option is the same slice: a move to it would only restart the gang in place."""
    for other in before:
        mine, its = option.choice.slice, other.choice.slice
        alike = (other.layout, its.provisioning, its.formation) == (option.layout, mine.provisioning, mine.formation)
        if alike and not option.choice.is_own:
            yield Problem(option.choice.field, f"is the same as {other.choice.field}; name another one or leave it out")
            return


def _counts(spec: Spec, resolution: Resolution, problems: list[Problem]) -> Iterator[int]:
    """Yields the numbers of slices below spec.slice.count that the job may run on, the largest first.

    Leaves out those over whose replicas a constant batch does not divide. The user has written the least, so that must
    be one of the rest.
    """
    policy, layout, field = spec.placement, resolution.layout, "spec.placement.count.min"
    if policy is None or policy.count is None:
        return
    least, batch = policy.count.min, resolution.recipe.batch.total
    is_constant = policy.batch is MoveBatch.CONSTANT
    possible = [n for n in range(1, layout.slices) if not is_constant or batch % (n * layout.shape.devices) == 0]
    if least not in possible:
        nearest = sorted(sorted(possible, key=lambda n: abs(n - least))[:_MOST_NEAREST])
        hint = f"; nearest: {', '.join(map(str, nearest))}" if nearest else ""
        replicas = f"{least} x {count(layout.shape.devices, 'replica')}"
        problems.append(Problem(field, f"the global batch of {batch} does not divide over {replicas}{hint}"))
        return
    fewer = [n for n in reversed(possible) if n >= least]
    if len(fewer) > MOST_COUNTS:
        message = f"{len(fewer)} numbers of slices are more than the {MOST_COUNTS} that a job may have"
        problems.append(Problem(field, f"{message}; give at least {fewer[MOST_COUNTS - 1]}"))
        return
    yield from fewer


def with_spec(job: TPUTrainingJob, **changes: object) -> TPUTrainingJob:
    return TPUTrainingJob.model_validate(dict(job) | {"spec": Spec.model_validate(dict(job.spec) | changes)})


def broken_rules(job: TPUTrainingJob, moved: TPUTrainingJob, field: str) -> Iterator[Problem]:
    """Yields the rules over the slice and another field that only the job on the slice at `field` breaks. The API
    server checks them for spec.slice alone."""
    # These are about the job's own slice.
    moved = with_spec(moved, ladder=None, placement=None)
    pairs: tuple[tuple[ApiModel, ApiModel], ...] = ((job, moved), (job.spec, moved.spec))
    for before, after in pairs:
        for rule in type(before).rules:
            if rule.is_broken_by(after) and not rule.is_broken_by(before):
                yield Problem(field, rule.text(after))


def at_slice(problem: Problem, field: str, hint: str = "") -> Problem:
    """Returns the problem at the path of the slice: the fields of the recipe are right for the job's own slice."""
    return problem if problem.field.startswith(field) else Problem(field, f"{problem.field}: {problem.message}{hint}")


def _hint(problem: Problem, job: TPUTrainingJob, choice: SliceChoice) -> str:
    """Names slices of the same generation over which the batch divides, the nearest in size first."""
    if problem.field != "spec.recipe.globalBatchSize":
        return ""
    layout, batch = layout_of(choice.slice, choice.field), resolve(job.spec).recipe.batch.total
    generation = generations().get(layout.shape.generation)
    shapes = [shape for shape in generation.shapes if shape.default] if generation else []
    divisors = [shape for shape in shapes if batch % (layout.slices * shape.devices) == 0]
    divisors.sort(key=lambda shape: abs(shape.devices - layout.shape.devices))
    names = list(dict.fromkeys(str(SliceLayout(shape, layout.slices)) for shape in divisors))[:_MOST_NEAREST]
    return f"; slices that divide {batch}: {', '.join(names)}" if names else ""
