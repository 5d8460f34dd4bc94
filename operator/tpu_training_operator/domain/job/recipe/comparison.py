"""The slice and the recipe side by side, as tuned and as they run, with the rule between them."""

from collections.abc import Iterator, Sequence

from tpu_contract.protocol import DEFAULT_FACTOR
from tpu_contract.run_spec import NotFinitePolicy, Precision, ScalingRow, ScheduleName, Sharding
from tpu_training_operator.api.decimals import readable
from tpu_training_operator.api.recipe import Recipe
from tpu_training_operator.api.words import count
from tpu_training_operator.domain.job.recipe.ledger import Note
from tpu_training_operator.domain.job.recipe.resolve import Resolution
from tpu_training_operator.domain.job.recipe.scale import ScaledRecipe

_NONE = "-"


def comparison(recipe: Recipe, resolution: Resolution) -> tuple[ScalingRow, ...]:
    """Returns the rows about the slice, then one for every number of the recipe that a rule may change."""
    return (*_slice_rows(recipe, resolution), *_number_rows(recipe, resolution))


def _slice_rows(recipe: Recipe, resolution: Resolution) -> Iterator[ScalingRow]:
    # Without `tunedOn`, no other slice is known.
    layout, tuned = resolution.layout, resolution.tuned_on if recipe.tuned_on is not None else None
    yield _row("slice", tuned, layout)
    yield _row("topology", tuned and tuned.shape.topology, layout.shape.topology)
    yield _row("hosts", tuned and tuned.hosts, layout.hosts, f"{count(layout.shape.chips_per_host, 'chip')} each")
    yield _row("chips", tuned and tuned.chips, layout.chips)
    yield _row("replicas", tuned and tuned.replicas, layout.replicas, "one per XLA device")


def _number_rows(recipe: Recipe, resolution: Resolution) -> Iterator[ScalingRow]:
    scaled = resolution.recipe
    rules = _rules(scaled.notes)
    yield _row("batch per replica", recipe.global_batch_size // resolution.tuned_on.replicas, scaled.batch.per_replica)
    if scaled.batch.accumulation > 1:
        yield _row("accumulation", 1, scaled.batch.accumulation, "passes before a step")
    yield _row("global batch", recipe.global_batch_size, scaled.batch.total, rules.get("globalBatchSize", ""))
    yield _row("train steps", _tuned(recipe.train_steps, recipe.epochs), scaled.steps, rules.get("trainSteps", ""))
    warmup = _tuned(recipe.warmup_steps, recipe.warmup_epochs)
    yield _row("warm-up steps", warmup, scaled.warmup_steps, rules.get("warmupSteps", ""))
    rate = _short(recipe.optimizer.learning_rate)
    yield _row("learning rate", rate, scaled.learning_rate, rules.get("learningRate", ""))
    unusual = recipe.on_not_finite is not NotFinitePolicy.STOP
    divided = recipe.sharding is not Sharding.REPLICATED
    reduced = recipe.precision is not Precision.FLOAT32
    milestones = _tuned(recipe.schedule.milestones, recipe.schedule.milestone_epochs)
    every = _tuned(recipe.evaluate_every_steps, recipe.evaluate_every_epochs)
    optional = (
        ("milestones", milestones, list(scaled.milestones) or None, "milestones"),
        ("evaluate every", every, scaled.evaluate_every_steps, "evaluateEverySteps"),
        ("weight decay", _short(recipe.optimizer.weight_decay), _short(scaled.weight_decay), "weightDecay"),
        ("beta1", recipe.optimizer.beta1, scaled.betas.get("beta1"), "beta1"),
        ("beta2", recipe.optimizer.beta2, scaled.betas.get("beta2"), "beta2"),
        ("epsilon", _short(recipe.optimizer.epsilon), _short(scaled.epsilon), "epsilon"),
        ("EMA decay", recipe.ema_decay, scaled.ema_decay, "emaDecay"),
        ("gradient clip norm", recipe.gradient_clip_norm, recipe.gradient_clip_norm, "gradientClipNorm"),
        ("precision", recipe.precision, recipe.precision if reduced else None, "precision"),
        ("sharding", recipe.sharding, recipe.sharding if divided else None, "sharding"),
        ("on not finite", recipe.on_not_finite, recipe.on_not_finite if unusual else None, "onNotFinite"),
    )
    for name, before, now, field in optional:
        if now is not None:
            yield _row(name, before, now, rules.get(field, "as in the recipe"))
    yield from _evaluation_rows(recipe, scaled)


def _tuned(steps: object, epochs: int | list[int] | None) -> object:
    """Returns what the recipe gives, in steps or in epochs."""
    if isinstance(epochs, list):
        return f"{'epoch' if len(epochs) == 1 else 'epochs'} {_text(epochs)}"
    return steps if epochs is None else count(epochs, "epoch")


def _evaluation_rows(recipe: Recipe, scaled: ScaledRecipe) -> Iterator[ScalingRow]:
    """Yields the rows about decisions from evaluations."""
    schedule, stop = recipe.schedule, recipe.stop_early
    if schedule.name is ScheduleName.PLATEAU:
        factor = f"x {DEFAULT_FACTOR if schedule.factor is None else schedule.factor}"
        rule = f"after {count(scaled.plateau_patience or 0, 'evaluation')} without a better {schedule.metric}"
        yield _row("rate on a plateau", factor, factor, rule)
    if stop is not None:
        before, after = count(stop.patience, "evaluation"), count(scaled.stop_patience or 0, "evaluation")
        by = f" by more than {stop.min_delta}" if stop.min_delta is not None else ""
        yield _row("stop early", before, after, f"without a better {stop.metric}{by}")


def _row(name: str, before: object, now: object, rule: str = "") -> ScalingRow:
    return ScalingRow(name, _text(before), _text(now), rule)


def _short(number: str | None) -> str | None:
    return None if number is None else readable(number)


def _text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return _NONE if value is None else str(value)


def _rules(notes: Sequence[Note]) -> dict[str, str]:
    """Returns the rules by field; several about one field are joined."""
    rules: dict[str, str] = {}
    for field, rule in notes:
        rules[field] = f"{rules[field]}; {rule}" if field in rules else rule
    return rules
