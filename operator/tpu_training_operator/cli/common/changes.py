"""Changes a job as the command line asks, before it is checked: `--slice`, `--steps`, `--set PATH=VALUE`, `tpujob run`.

The file itself stays as the cluster gets it: a try on another slice, or of ten steps, needs no copy.
"""

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any

import click
import yaml

from tpu_training_operator.api.crd import custom_resource_definition
from tpu_training_operator.api.slice import Hardware, Slice, SliceRef
from tpu_training_operator.api.validation import InvalidJob
from tpu_training_operator.cli.common.errors import WrongOption
from tpu_training_operator.cli.common.yaml_text import load
from tpu_training_operator.domain.job.recipe.resolve import Resolution
from tpu_training_operator.domain.job.topology import SliceLayout, layout_of

Body = dict[str, Any]

_REFERENCE = tuple(field.alias for field in SliceRef.model_fields.values())


def slice_option(command: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--slice",
        "on_slice",
        metavar="TYPE",
        help="Run on this accelerator type instead; the recipe is scaled from recipe.tunedOn, else from its slice.",
    )(command)


def set_option(command: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--set",
        "values",
        metavar="PATH=VALUE",
        multiple=True,
        help="Change a field of the spec, for example recipe.seed=1; null takes it out. Can be repeated.",
    )(command)


def apply_options(body: Body, assignments: Sequence[str], on_slice: str | None) -> None:
    """Applies `--set` and then `--slice`."""
    set_values(body, assignments)
    if on_slice is not None:
        move(body, on_slice)


def move(body: Body, accelerator_type: str) -> None:
    """Moves the job to another slice. A recipe without tunedOn counts as tuned on the job's own slice. Removes the
    ladder, which leads to that slice, and an alternative that is the new one."""
    spec = body.get("spec")
    if not isinstance(spec, dict) or not isinstance(spec.get("slice"), dict):
        # The check reports what is wrong.
        return
    previous = {name: value for name, value in spec["slice"].items() if name in _REFERENCE}
    if isinstance(recipe := spec.get("recipe"), dict) and recipe.get("tunedOn") is None:
        recipe["tunedOn"] = previous
    other_fields = {name: value for name, value in spec["slice"].items() if name not in _REFERENCE or name == "count"}
    spec["slice"] = {"acceleratorType": accelerator_type, **other_fields}
    spec.pop("ladder", None)
    _remove_repetition(spec)


def _remove_repetition(spec: Body) -> None:
    """Removes the alternative that is the job's own slice, and a placement that is then without any choice."""
    placement = spec.get("placement")
    if not isinstance(placement, dict) or not isinstance(others := placement.get("alternatives"), list):
        return
    own = _meaning(spec["slice"])
    left = [one for one in others if own is None or not isinstance(one, dict) or _meaning(one.get("slice")) != own]
    # A copy, as with an anchor in the YAML it may stand in another place, too.
    spec["placement"] = {**placement, "alternatives": left or None}
    if not left and placement.get("count") is None:
        del spec["placement"]


def _meaning(slice_: Any) -> tuple[SliceLayout, object] | None:
    """Returns what tells a slice from others; None for one that the check will refuse."""
    try:
        parsed = Slice.model_validate(slice_)
        return layout_of(parsed, ""), (parsed.provisioning, parsed.formation)
    except (ValueError, InvalidJob, IndexError):
        return None


def begin_from_scratch(body: Body) -> None:
    """Gives the job a new folder for its checkpoints, so that none of an earlier job is in it. Raises WrongOption if
    the job continues a training by its spec."""
    spec = body.get("spec")
    if not isinstance(spec, dict) or not isinstance(checkpoint := spec.get("checkpoint"), dict):
        return
    if not (uri := checkpoint.get("uri")):
        # The check reports what is wrong.
        return
    if checkpoint.get("resumeFrom") is not None:
        raise WrongOption("--from-scratch: the job continues checkpoint.resumeFrom; leave out one of the two")
    spec["checkpoint"] = {**checkpoint, "uri": f"{str(uri).rstrip('/')}/from-scratch-{datetime.now(UTC):%Y%m%d-%H%M%S}"}


def rehearse(body: Body) -> None:
    """Makes the job, its alternatives and its ladder run on the CPUs of this machine."""
    spec = body.get("spec")
    for holder in _slice_holders(spec):
        # A copy: with an anchor in the YAML, recipe.tunedOn may be the same mapping.
        holder["slice"] = {**holder["slice"], "hardware": Hardware.CPU.value}
    trainer = spec.get("trainer") if isinstance(spec, dict) else None
    if isinstance(trainer, dict) and trainer.get("image") is None:
        # A first job often has no image yet, and nothing here would pull it.
        trainer["image"] = "none"


def set_values(body: Body, assignments: Sequence[str]) -> None:
    """Sets fields of the spec. Raises WrongOption if a text is not PATH=VALUE for a field."""
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path:
            raise WrongOption(f"--set {assignment}: expected PATH=VALUE, for example recipe.seed=1")
        names = path.removeprefix("spec.").split(".")
        _put(body, ["spec", *names], _value(assignment, names, text), assignment)


def shorten(body: Body, resolution: Resolution, steps: int) -> None:
    """Shortens the training to about `steps` steps on this slice; warm-up, milestones and evaluations shrink in
    proportion.

    On a slice smaller than the recipe's, the number of steps is a multiple of the scale factor.
    """
    recipe, scaled = body["spec"]["recipe"], resolution.recipe
    tuned = max(1, steps * scaled.step_batch // recipe["globalBatchSize"])
    before = recipe.get("trainSteps") or Fraction(scaled.train_steps * scaled.step_batch, recipe["globalBatchSize"])
    share = min(Fraction(1), tuned / Fraction(before))
    recipe.pop("epochs", None)
    recipe["trainSteps"] = tuned
    (recipe.get("scaling") or {}).pop("steps", None)
    counted = {"warmup": (scaled.warmup_steps, scaled.step_batch)}
    counted["evaluateEvery"] = (scaled.evaluate_every_steps or 0, scaled.batch.total)
    for name, (now, batch) in counted.items():
        if recipe.pop(f"{name}Epochs", None) is not None:
            recipe[f"{name}Steps"] = now * batch // recipe["globalBatchSize"]
    if recipe.get("warmupSteps"):
        recipe["warmupSteps"] = int(recipe["warmupSteps"] * share)
    if recipe.get("evaluateEverySteps"):
        recipe["evaluateEverySteps"] = max(1, int(recipe["evaluateEverySteps"] * share))
    schedule = recipe.get("schedule") or {}
    if schedule.pop("milestoneEpochs", None):
        # Without epochs, milestones are counted in steps of the recipe's own batch.
        schedule["milestones"] = [
            Fraction(step * scaled.step_batch, recipe["globalBatchSize"]) for step in scaled.milestones
        ]
    if schedule.get("milestones"):
        schedule["milestones"] = sorted({max(1, int(step * share)) for step in schedule["milestones"]})


def _slice_holders(spec: Any) -> Iterator[dict[str, Any]]:
    """Yields the mappings that have a `slice`: the spec, its alternatives and the rungs of its ladder."""
    if not isinstance(spec, dict):
        return
    ladder, placement = spec.get("ladder"), spec.get("placement")
    rungs = ladder.get("rungs") if isinstance(ladder, dict) else None
    others = placement.get("alternatives") if isinstance(placement, dict) else None
    for holder in (spec, *(item for items in (rungs, others) if isinstance(items, list) for item in items)):
        if isinstance(holder, dict) and isinstance(holder.get("slice"), dict):
            yield holder


def _put(at: Any, names: Sequence[str], value: Any, assignment: str) -> None:
    *above, last = names
    for walked, name in enumerate(above):
        child = {} if at.get(name) is None else at[name]
        if not isinstance(child, dict):
            place = ".".join(names[: walked + 1])
            raise WrongOption(f"--set {assignment}: {place} is not a mapping, so a part of it cannot be set")
        # A copy: with an anchor in the YAML, the same mapping may stand in another place, too.
        at[name] = at = dict(child)
    at[last] = value


def _value(assignment: str, path: Sequence[str], text: str) -> Any:
    """Reads the value as YAML, but keeps it as text where the API expects text: a parameter of 0.1 is a string."""
    if _is_text_field(path) and text != "null":
        return text
    try:
        return load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise WrongOption(f"--set {assignment}: not valid YAML: {' '.join(str(error).split())}") from None


def _is_text_field(path: Sequence[str]) -> bool:
    (version,) = custom_resource_definition()["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    for part in path:
        schema = schema.get("properties", {}).get(part) or schema.get("additionalProperties")
        if not isinstance(schema, dict):
            return False
    return bool(schema.get("type") == "string")
