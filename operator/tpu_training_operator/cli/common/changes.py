"""What the command line changes in a job before it is checked: `--slice`, `--steps`, `--set PATH=VALUE`, `tpujob run`.

A job file stays the one that the cluster gets; a try on another slice, or of ten steps, needs no copy of it.
"""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import click
import yaml

from tpu_training_operator.api.crd import custom_resource_definition
from tpu_training_operator.api.slice import Hardware, SliceRef
from tpu_training_operator.cli.common.errors import CommandError
from tpu_training_operator.cli.common.yaml_text import load
from tpu_training_operator.domain.job.recipe.resolve import Resolution

Body = dict[str, Any]

_REFERENCE = tuple(field.alias for field in SliceRef.model_fields.values())


def slice_option(command: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--slice",
        "on_slice",
        metavar="TYPE",
        help="Run on this accelerator type instead; the recipe is scaled from the job's own slice.",
    )(command)


def set_option(command: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--set",
        "values",
        metavar="PATH=VALUE",
        multiple=True,
        help="Change a field of the spec, for example recipe.seed=1. Can be repeated.",
    )(command)


def apply_options(body: Body, assignments: Sequence[str], on_slice: str | None) -> None:
    """Applies `--set` and then `--slice`."""
    set_values(body, assignments)
    if on_slice is not None:
        move(body, on_slice)


def move(body: Body, accelerator_type: str) -> None:
    """Puts the job on another slice. A recipe without tunedOn was tuned on the job's own slice. A ladder leads to that
    slice, and is left out."""
    spec = body.get("spec")
    if not isinstance(spec, dict) or not isinstance(spec.get("slice"), dict):
        # The check says what is wrong.
        return
    own = {name: value for name, value in spec["slice"].items() if name in _REFERENCE}
    if isinstance(spec.get("recipe"), dict):
        spec["recipe"].setdefault("tunedOn", own)
    kept = {name: value for name, value in spec["slice"].items() if name not in _REFERENCE or name == "count"}
    spec["slice"] = {"acceleratorType": accelerator_type, **kept}
    spec.pop("ladder", None)


def rehearse(body: Body) -> None:
    """Puts the job, its alternatives and its ladder on the CPUs of this machine."""
    spec = body.get("spec")
    for holder in _holders_of_slices(spec):
        # A copy: with an anchor in the YAML, recipe.tunedOn may be the same mapping.
        holder["slice"] = {**holder["slice"], "hardware": Hardware.CPU.value}
    if isinstance(spec, dict) and isinstance(spec.get("trainer"), dict):
        # The first job of most people has none yet, and here nothing would pull it.
        spec["trainer"].setdefault("image", "none")


def set_values(body: Body, assignments: Sequence[str]) -> None:
    """Sets fields of the spec. Raises CommandError for anything but an assignment to a field."""
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path:
            raise CommandError(f"--set {assignment}: expected PATH=VALUE, for example recipe.seed=1")
        names = path.removeprefix("spec.").split(".")
        _put(body, ["spec", *names], _value(assignment, names, text), assignment)


def shorten(body: Body, resolution: Resolution, steps: int) -> None:
    """Trains about `steps` steps on this slice; warm-up, milestones and evaluations shrink in proportion.

    On a slice smaller than the recipe's, only multiples of the scale factor can be had.
    """
    recipe, scaled = body["spec"]["recipe"], resolution.recipe
    tuned = max(1, steps * scaled.batch.total // recipe["globalBatchSize"])
    before = recipe.get("trainSteps") or Fraction(scaled.train_steps * scaled.batch.total, recipe["globalBatchSize"])
    share = min(Fraction(1), tuned / Fraction(before))
    for name in ("epochs", "datasetSize"):
        recipe.pop(name, None)
    recipe["trainSteps"] = tuned
    if recipe.get("warmupSteps"):
        recipe["warmupSteps"] = int(recipe["warmupSteps"] * share)
    if recipe.get("evaluateEverySteps"):
        recipe["evaluateEverySteps"] = max(1, int(recipe["evaluateEverySteps"] * share))
    schedule = recipe.get("schedule") or {}
    if schedule.pop("milestoneEpochs", None):
        # Without epochs they are steps of the recipe's batch.
        schedule["milestones"] = [
            Fraction(step * scaled.batch.total, recipe["globalBatchSize"]) for step in scaled.milestones
        ]
    if schedule.get("milestones"):
        schedule["milestones"] = sorted({max(1, int(step * share)) for step in schedule["milestones"]})


def _holders_of_slices(spec: Any) -> Iterator[dict[str, Any]]:
    """What has a `slice`: the job, its alternatives and the rungs of its ladder, where the body has the right form."""
    if not isinstance(spec, dict):
        return
    ladder, placement = spec.get("ladder"), spec.get("placement")
    rungs = ladder.get("rungs") if isinstance(ladder, dict) else None
    others = placement.get("alternatives") if isinstance(placement, dict) else None
    for holder in (spec, *(found for each in (rungs, others) if isinstance(each, list) for found in each)):
        if isinstance(holder, dict) and isinstance(holder.get("slice"), dict):
            yield holder


def _put(at: Any, names: Sequence[str], value: Any, assignment: str) -> None:
    *above, last = names
    for walked, name in enumerate(above):
        found = {} if at.get(name) is None else at[name]
        if not isinstance(found, dict):
            place = ".".join(names[: walked + 1])
            raise CommandError(f"--set {assignment}: {place} is not a mapping, so a part of it cannot be set")
        # A copy: with an anchor in the YAML, the same mapping may stand in another place, too.
        at[name] = at = dict(found)
    at[last] = value


def _value(assignment: str, path: Sequence[str], text: str) -> Any:
    """As YAML would read it, but text where the API wants text: a parameter of 0.1 is a string."""
    if _wants_text(path):
        return text
    try:
        return load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise CommandError(f"--set {assignment}: not valid YAML: {' '.join(str(error).split())}") from None


def _wants_text(path: Sequence[str]) -> bool:
    (version,) = custom_resource_definition()["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    for part in path:
        schema = schema.get("properties", {}).get(part) or schema.get("additionalProperties")
        if not isinstance(schema, dict):
            return False
    return bool(schema.get("type") == "string")
