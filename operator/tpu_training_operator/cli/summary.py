"""The table of a job before it runs: tuned on, runs on, and the rule between them. Used by `plan` and `run`."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tpu_training_operator.api.slice import Hardware
from tpu_training_operator.cli.job_file import JobFile
from tpu_training_operator.domain.checkpointing import interval_text
from tpu_training_operator.domain.cost import Cost

_NARROWEST = 100


def print_summary(file: JobFile, warnings: list[str], cost: Cost | None = None) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        # A pipe has no width; the default of 80 would break the rules over many lines.
        console = Console(highlight=False, width=_NARROWEST + 40)
    console.print(_table(file, cost))
    for warning in warnings:
        # One line, however long: a terminal wraps it by itself, and a pipe can be searched.
        console.print(f"[yellow]warning:[/yellow] {escape(warning)}", soft_wrap=True)


def _table(file: JobFile, cost: Cost | None) -> Table:
    resolution, recipe = file.resolution, file.job.spec.recipe
    layout, tuned, scaled = resolution.layout, resolution.tuned_on, resolution.recipe
    hardware = "" if file.job.spec.slice.hardware is Hardware.TPU else ", rehearsed on CPU"
    table = Table(title=f"{file.job.name}: {layout}{hardware}", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("tuned on", justify="right")
    table.add_column("runs on", justify="right", style="bold")
    table.add_column("rule", style="dim", overflow="fold")
    rules = _rules(scaled.notes)

    def row(name: str, before: object, now: object, rule: str = "") -> None:
        table.add_row(name, str(before), str(now), escape(rule))

    row("slice", tuned, layout)
    row("topology", tuned.shape.topology, layout.shape.topology)
    row("hosts", tuned.hosts, layout.hosts, f"{layout.shape.chips_per_host} chips each")
    row("chips", tuned.chips, layout.chips)
    row("replicas", tuned.replicas, layout.replicas, "one per XLA device")
    row("batch per replica", recipe.global_batch_size // tuned.replicas, scaled.batch.per_replica)
    if scaled.batch.accumulation > 1:
        row("accumulation", 1, scaled.batch.accumulation, "passes before a step")
    row("global batch", recipe.global_batch_size, scaled.batch.total, rules.get("globalBatchSize", ""))
    row("train steps", recipe.train_steps or "-", scaled.train_steps, rules.get("trainSteps", ""))
    row("warm-up steps", _given(recipe.warmup_steps), scaled.warmup_steps, rules.get("warmupSteps", ""))
    row("learning rate", recipe.optimizer.learning_rate, scaled.learning_rate, rules.get("learningRate", ""))
    optional = (
        ("milestones", recipe.schedule.milestones, list(scaled.milestones) or None, "milestones"),
        ("evaluate every", recipe.evaluate_every_steps, scaled.evaluate_every_steps, "evaluateEverySteps"),
        ("weight decay", recipe.optimizer.weight_decay, scaled.weight_decay, "weightDecay"),
        ("beta1", recipe.optimizer.beta1, scaled.betas.get("beta1"), "beta1"),
        ("beta2", recipe.optimizer.beta2, scaled.betas.get("beta2"), "beta2"),
        ("EMA decay", recipe.ema_decay, scaled.ema_decay, "emaDecay"),
    )
    for name, before, now, field in optional:
        if now is not None:
            row(name, _given(before), _given(now), rules.get(field, "as in the recipe"))
    if (checkpoint := file.job.spec.checkpoint) is not None:
        row("checkpoint", "", interval_text(checkpoint), f"in {checkpoint.uri}; the newest {checkpoint.keep} are kept")
    for name, value in (cost.lines() if cost else {}).items():
        row(name, "", value, "one training without interruptions")
    return table


def _given(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "-" if value is None else str(value)


def _rules(notes: Sequence[str]) -> dict[str, str]:
    """The notes by the field that they begin with; several about one field stand together."""
    rules: dict[str, str] = {}
    for note in notes:
        name, _, rule = note.partition(": ")
        rules[name] = f"{rules[name]}; {rule}" if name in rules else rule
    return rules
