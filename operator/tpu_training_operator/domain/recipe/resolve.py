"""Everything derived from a spec, in one value."""

from dataclasses import dataclass

from tpu_training_operator.api.job import Spec
from tpu_training_operator.api.status import LONGEST_TEXT, Resolved
from tpu_training_operator.api.validation import InvalidJob, Problem
from tpu_training_operator.domain.recipe import backends, own_loop, parameters
from tpu_training_operator.domain.recipe.numbers import decimal, plain
from tpu_training_operator.domain.recipe.scale import ScaledRecipe, scale
from tpu_training_operator.domain.recipe.unused_fields import unused
from tpu_training_operator.domain.topology import SliceLayout, layout_of


@dataclass(frozen=True)
class Resolution:
    layout: SliceLayout
    tuned_on: SliceLayout
    recipe: ScaledRecipe
    warnings: tuple[str, ...]

    @property
    def resolved(self) -> Resolved:
        """The form that stands in `status.resolved`."""
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
            ema_decay=recipe.ema_decay,
            scale_factor=plain(round(decimal(recipe.factor), 6)),
            notes=[_fitting(note) for note in (*recipe.notes, *(f"warning: {warning}" for warning in self.warnings))],
        )


def check_hosts(resolution: Resolution, most: int) -> None:
    """Raises InvalidJob for more hosts than this operator takes; the API's own bound is a rule of `api.slice`."""
    hosts = resolution.layout.hosts
    if hosts > most:
        message = f"{hosts} hosts are too many: this operator takes jobs of at most {most} (its option --max-hosts)"
        raise InvalidJob([Problem("spec.slice", message)])


def _fitting(note: str) -> str:
    """Thirty-two milestones of sixteen digits are more than the status has room for."""
    return note if len(note) <= LONGEST_TEXT else f"{note[: LONGEST_TEXT - 3]}..."


def resolve(spec: Spec) -> Resolution:
    """What the spec means. Raises InvalidJob for what the catalogue or the arithmetic rules out."""
    layout = layout_of(spec.slice, "spec.slice")
    tuned_on = layout_of(spec.recipe.tuned_on, "spec.recipe.tunedOn") if spec.recipe.tuned_on else layout
    problems = [*backends.problems(spec, layout), *parameters.problems(spec.recipe.parameters or {})]
    if problems:
        raise InvalidJob(problems)
    recipe = scale(spec.recipe, tuned_on.replicas, layout.replicas)
    warnings = [*recipe.warnings, *own_loop.warnings(spec, layout.hosts)]
    if spec.trainer.entrypoint is not None:
        warnings += unused(spec.recipe, recipe)
    if not layout.shape.verified:
        warnings.append(f"{layout.shape.topology} on {layout.shape.generation} is listed by one source only")
    return Resolution(layout, tuned_on, recipe, tuple(warnings))
