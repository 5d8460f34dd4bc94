"""Every slice that a job may run on, with all that follows from it, or why it cannot be used.

A job is checked for all its slices before it starts, so that a mistake does not surface at the first move, days later.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tpu_training_operator.api.catalogue import generations
from tpu_training_operator.api.job import Spec, TPUTrainingJob
from tpu_training_operator.api.model import ApiModel
from tpu_training_operator.api.placement import MoveBatch
from tpu_training_operator.api.slice import Provisioning, ProvisioningType
from tpu_training_operator.api.validation import InvalidJob, Problem
from tpu_training_operator.api.words import count
from tpu_training_operator.domain.job.choice import SliceChoice, alternatives, fewer_slices, on_slice, own_choice
from tpu_training_operator.domain.job.recipe.resolve import Resolution, resolve
from tpu_training_operator.domain.job.topology import SliceLayout, layout_of

_MOST_NEAREST = 3
MOST_COUNTS = 16
"""Numbers of slices below spec.slice.count that one job is checked for."""


@dataclass(frozen=True)
class SliceOption:
    """A choice. `job`: the job with this slice as its spec.slice, for everything that need not know of moves."""

    choice: SliceChoice
    job: TPUTrainingJob
    resolution: Resolution

    @property
    def number(self) -> int:
        return self.choice.number

    @property
    def is_own(self) -> bool:
        """Whether it is spec.slice, or fewer of the same."""
        return self.choice.is_own

    @property
    def layout(self) -> SliceLayout:
        return self.resolution.layout

    @property
    def program(self) -> tuple[str, str, int, int]:
        """Steps with the same value are the same program: it depends on the slice's shape and the batch of a
        replica."""
        shape, batch = self.layout.shape, self.resolution.recipe.batch
        return shape.generation, shape.topology, batch.per_replica, batch.accumulation

    def __str__(self) -> str:
        how = _provisioned(self.choice.slice.provisioning)
        return f"{self.layout} ({how})" if how else str(self.layout)


_WAYS = {
    ProvisioningType.SPOT: "spot",
    ProvisioningType.FLEX_START: "flex-start",
    ProvisioningType.QUEUED: "queued",
}


def _provisioned(provisioning: Provisioning | None) -> str:
    """What tells two slices of one shape apart."""
    if provisioning is None:
        return ""
    if provisioning.reservation:
        return f"reservation {provisioning.reservation.rpartition('reservations/')[2]}"
    return _WAYS.get(provisioning.type, "")


def other_programs(first: SliceOption, others: Iterable[SliceOption]) -> list[SliceOption]:
    """Those of them whose step is not the same program as that of `first`, one for each program."""
    found = {first.program: first}
    for option in others:
        found.setdefault(option.program, option)
    return list(found.values())[1:]


def options_of(job: TPUTrainingJob) -> tuple[SliceOption, ...]:
    """In order of preference; the first is spec.slice. Raises InvalidJob with the problems of all of them."""
    own = resolve(job.spec)
    found, problems = [SliceOption(own_choice(job.spec), job, own)], list[Problem]()
    counts = list(_counts(job.spec, own, problems))
    for choice in (*fewer_slices(job.spec, counts), *alternatives(job.spec, len(counts) + 1)):
        there = _on(job, choice)
        problems += broken_there(job, _apart(there), choice)
        try:
            option = SliceOption(choice, there, resolve(job.spec, choice))
        except InvalidJob as error:
            problems += [_of_choice(problem, job, choice) for problem in error.problems]
            continue
        problems += _same(option, found)
        found.append(option)
    if problems:
        raise InvalidJob(problems)
    return tuple(found)


def _same(option: SliceOption, before: list[SliceOption]) -> Iterator[Problem]:
    """Such a move would stop the gang only to start it on the same slice."""
    for other in before:
        alike = (other.layout, other.choice.slice.provisioning) == (option.layout, option.choice.slice.provisioning)
        if alike and not option.choice.is_own:
            yield Problem(option.choice.field, f"is the same as {other.choice.field}; name another one or leave it out")
            return


def _counts(spec: Spec, own: Resolution, problems: list[Problem]) -> Iterator[int]:
    """The numbers of slices below spec.slice.count that the job may run on, the largest first.

    With a constant batch, those over whose replicas it does not divide are left out. Somebody has written the least, so
    that must be one of them.
    """
    policy, layout, field = spec.placement, own.layout, "spec.placement.count.min"
    if policy is None or policy.count is None:
        return
    least, batch = policy.count.min, own.recipe.batch.total
    is_constant = policy.batch is MoveBatch.CONSTANT
    fitting = [n for n in range(1, layout.slices) if not is_constant or batch % (n * layout.shape.devices) == 0]
    if least not in fitting:
        nearest = sorted(sorted(fitting, key=lambda n: abs(n - least))[:_MOST_NEAREST])
        possible = f"; nearest: {', '.join(map(str, nearest))}" if nearest else ""
        over = f"{least} x {count(layout.shape.devices, 'replica')}"
        problems.append(Problem(field, f"the global batch of {batch} does not divide over {over}{possible}"))
        return
    fewer = [n for n in reversed(fitting) if n >= least]
    if len(fewer) > MOST_COUNTS:
        message = f"{len(fewer)} numbers of slices are more than the {MOST_COUNTS} that a job may have"
        problems.append(Problem(field, f"{message}; give at least {fewer[MOST_COUNTS - 1]}"))
        return
    yield from fewer


def _on(job: TPUTrainingJob, choice: SliceChoice) -> TPUTrainingJob:
    return TPUTrainingJob.model_validate(dict(job) | {"spec": on_slice(job.spec, choice)})


def _apart(there: TPUTrainingJob) -> TPUTrainingJob:
    """Without the fields that are about the job's own slice: its ladder, and where else it may run."""
    spec = Spec.model_validate(dict(there.spec) | {"ladder": None, "placement": None})
    return TPUTrainingJob.model_validate(dict(there) | {"spec": spec})


def broken_there(job: TPUTrainingJob, there: TPUTrainingJob, choice: SliceChoice) -> Iterator[Problem]:
    """Rules over the slice and another field, which the API server checks only for spec.slice."""
    pairs: tuple[tuple[ApiModel, ApiModel], ...] = ((job, there), (job.spec, there.spec))
    for own, other in pairs:
        for rule in type(own).rules:
            if rule.is_broken_by(other) and not rule.is_broken_by(own):
                yield Problem(choice.field, rule.text(other))


def _of_choice(problem: Problem, job: TPUTrainingJob, choice: SliceChoice) -> Problem:
    if problem.field.startswith(choice.field):
        return problem
    nearest = _nearest(job, choice) if problem.field == "spec.recipe.globalBatchSize" else ""
    return Problem(choice.field, f"{problem.field}: {problem.message}{nearest}")


def _nearest(job: TPUTrainingJob, choice: SliceChoice) -> str:
    """Slices of the same generation over which the batch divides, the nearest in size first."""
    layout, batch = layout_of(choice.slice, choice.field), _global_batch(job)
    generation = generations().get(layout.shape.generation)
    shapes = [shape for shape in generation.shapes if shape.default] if generation else []
    fitting = [shape for shape in shapes if batch % (layout.slices * shape.devices) == 0]
    fitting.sort(key=lambda shape: abs(shape.devices - layout.shape.devices))
    names = list(dict.fromkeys(str(SliceLayout(shape, layout.slices)) for shape in fitting))[:_MOST_NEAREST]
    return f"; slices that divide {batch}: {', '.join(names)}" if names else ""


def _global_batch(job: TPUTrainingJob) -> int:
    return resolve(job.spec).recipe.batch.total
