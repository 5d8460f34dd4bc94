"""Everything that follows from a spec, in one value, or the reasons why the spec cannot run."""

from collections.abc import Iterator
from dataclasses import dataclass

from tpu_contract.words import cut
from tpu_training_operator.api.constants import LONGEST_KEY
from tpu_training_operator.api.job import InitFrom, Spec
from tpu_training_operator.api.ladder import Gates
from tpu_training_operator.api.slice import Hardware
from tpu_training_operator.api.status import LONGEST_TEXT, MOST_NOTES, PLAN_WARNING, Resolved
from tpu_training_operator.api.trainer import BackendName
from tpu_training_operator.api.validation import InvalidJob, Problem
from tpu_training_operator.api.words import count
from tpu_training_operator.domain.job.choice import SliceChoice, on_slice, own_choice
from tpu_training_operator.domain.job.naming import parameter_variable
from tpu_training_operator.domain.job.recipe.adascale import check_groups
from tpu_training_operator.domain.job.recipe.ledger import decimal, plain
from tpu_training_operator.domain.job.recipe.scale import ScaledRecipe, scale
from tpu_training_operator.domain.job.recipe.warnings import warnings
from tpu_training_operator.domain.job.topology import SliceLayout, layout_of


@dataclass(frozen=True)
class LowerRung:
    """A rung below the job, which makes only the first `steps` of the training. `folder_prefix`: begins the folders for
    checkpoints, one for each attempt of the rung; None if the rung needs none."""

    steps: int
    gates: Gates
    folder_prefix: str | None
    init_from: InitFrom | None

    def folder(self, attempt: int) -> str | None:
        return None if self.folder_prefix is None else f"{self.folder_prefix}-{attempt}"


@dataclass(frozen=True)
class JudgedSteps:
    """The first `steps` of the job on top of a ladder, and the gates by which they are judged."""

    steps: int
    gates: Gates


@dataclass(frozen=True)
class Resolution:
    """What a spec means on one slice. `option_number`: the number of the slice among the job's options, 0 for
    spec.slice. `lower_rung`: set on a lower rung of a ladder; None for the job itself. `judged`: set on the top rung.
    `noise_note`: where the gradient noise scale was measured, if a rung of the ladder has done so."""

    layout: SliceLayout
    tuned_on: SliceLayout
    recipe: ScaledRecipe
    warnings: tuple[str, ...]
    code_sha256: str | None = None
    option_number: int = 0
    lower_rung: LowerRung | None = None
    judged: JudgedSteps | None = None
    noise_note: str | None = None

    @property
    def steps(self) -> int:
        """The steps that the attempt should make."""
        return self.recipe.train_steps if self.lower_rung is None else self.lower_rung.steps

    @property
    def fewest_steps(self) -> int:
        """The steps after which the attempt may end: fewer than `steps` with AdaScale."""
        return min(self.recipe.fewest_steps, self.steps)

    @property
    def resolved(self) -> Resolved:
        """The value of `status.resolved`."""
        layout, recipe = self.layout, self.recipe
        shape = layout.shape
        return Resolved(
            accelerator_type=shape.accelerator_type,
            generation=shape.generation,
            topology=shape.topology,
            machine_type=(shape.machine_type.name or None) if shape.machine_type else None,
            slices=layout.slices,
            hosts_per_slice=layout.hosts_per_slice,
            hosts=layout.hosts,
            chips_per_host=shape.chips_per_host,
            chips=layout.chips,
            replicas=layout.replicas,
            per_replica_batch_size=recipe.batch.per_replica,
            accumulation_steps=recipe.batch.accumulation,
            global_batch_size=recipe.batch.total,
            train_steps=recipe.train_steps,
            warmup_steps=recipe.warmup_steps,
            milestones=list(recipe.milestones) or None,
            evaluate_every_steps=recipe.evaluate_every_steps,
            learning_rate=recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            beta1=recipe.betas.get("beta1"),
            beta2=recipe.betas.get("beta2"),
            epsilon=recipe.epsilon,
            ema_decay=recipe.ema_decay,
            scale_factor=plain(round(decimal(recipe.factor), 6)),
            code_sha256=self.code_sha256,
            notes=[cut(note, LONGEST_TEXT) for note in self._notes][:MOST_NOTES],
        )

    @property
    def _notes(self) -> Iterator[str]:
        yield from (f"{PLAN_WARNING}{text}" for text in self.warnings)
        if self.noise_note is not None:
            yield self.noise_note
        yield from map(str, self.recipe.notes)


def resolve(spec: Spec, choice: SliceChoice | None = None) -> Resolution:
    """Resolves the spec on the chosen slice, by default spec.slice.

    Raises InvalidJob for what the catalogue, the backend or the arithmetic rules out.
    """
    choice = choice or own_choice(spec)
    own_layout, layout = layout_of(spec.slice, "spec.slice"), layout_of(choice.slice, choice.field)
    tuned_on = layout_of(spec.recipe.tuned_on, "spec.recipe.tunedOn") if spec.recipe.tuned_on else own_layout
    moved = on_slice(spec, choice)
    problems = [*_backend_problems(moved, layout), *_parameter_problems(spec)]
    if problems:
        raise InvalidJob(problems)
    target = own_layout if choice.keeps_batch else layout
    recipe = scale(spec.recipe, tuned_on.replicas, target.replicas, spread_over=layout.replicas)
    check_groups(spec.recipe, recipe.batch, spec.trainer, layout)
    code = None if spec.trainer.code is None else spec.trainer.code.sha256
    return Resolution(layout, tuned_on, recipe, tuple(warnings(moved, layout, recipe)), code, choice.number)


def check_hosts(resolution: Resolution, most: int, field: str = "spec.slice") -> None:
    """Raises InvalidJob for more hosts than this operator accepts. The API's bound is a rule of `api.slice`."""
    hosts = resolution.layout.hosts
    if hosts > most:
        message = f"{count(hosts, 'host')} are too many: this operator accepts at most {most} (its option --max-hosts)"
        raise InvalidJob([Problem(field, message)])


def _backend_problems(spec: Spec, layout: SliceLayout) -> Iterator[Problem]:
    """Yields why the backend cannot run on this layout. The API has no rule, as only the catalogue knows the layout."""
    backend, torch = spec.trainer.backend, spec.trainer.torch
    if backend is BackendName.XLA_SPMD and spec.slice.hardware is Hardware.CPU and layout.hosts > 1:
        message = (
            f"XLASPMD on hardware CPU runs on one host, not on {layout.hosts}, because XLA's CPU client cannot connect"
            " processes; rehearse with XLA or Torch, or on a slice of one host"
        )
        yield Problem("spec.trainer.backend", message)
    per_host = layout.replicas // layout.hosts
    if torch is not None and torch.on_tpu and torch.processes_per_host != per_host:
        message = (
            f"TorchTPU runs a process for each device: {per_host} on each host of {layout}, got"
            f" {torch.processes_per_host}"
        )
        yield Problem("spec.trainer.torch.processesPerHost", message)
    elif torch is not None and per_host % torch.processes_per_host:
        divisors = [str(number) for number in range(1, per_host + 1) if per_host % number == 0]
        message = (
            f"{count(per_host, 'replica')} per host cannot be divided over {torch.processes_per_host} processes;"
            f" possible here: {', '.join(divisors)}"
        )
        yield Problem("spec.trainer.torch.processesPerHost", message)


def _parameter_problems(spec: Spec) -> Iterator[Problem]:
    """Yields parameters that would share an environment variable, or whose variable no ConfigMap can have.

    The API has no rule, because CEL cannot bound the cost of comparing map keys: a CRD cannot limit their length.
    """
    taken: dict[str, str] = {}
    for name in sorted(spec.recipe.parameters or {}):
        variable = parameter_variable(name)
        if (excess := len(variable) - LONGEST_KEY) > 0:
            message = (
                f"{cut(name, 40)!r} has {len(name)} characters; use at most {len(name) - excess}: with"
                f" TPUJOB_PARAMETER_ before it, the name is a key of a ConfigMap, which has at most {LONGEST_KEY}"
            )
            yield Problem("spec.recipe.parameters", message)
        other = taken.setdefault(variable, name)
        if other != name:
            message = f"{other!r} and {name!r} would both be the variable {variable}; rename one"
            yield Problem("spec.recipe.parameters", message)
