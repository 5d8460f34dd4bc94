"""Prints the answer of `tpujob compile-check`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_contract.words import several
from tpu_training_operator.api.words import count
from tpu_training_operator.cli.common.job_file import JobFile
from tpu_training_operator.cli.common.terminal import console
from tpu_training_operator.domain.job.recipe.bound import Bound
from tpu_training_operator.domain.job.recipe.compile_results import CompileResult, gib, milliseconds
from tpu_training_operator.domain.job.recipe.cost import Cost
from tpu_training_operator.domain.job.recipe.resolve import Resolution

_PIPE_WIDTH = 140
_LEAST_WIDE = 0.1
_MOST_COLLECTIVES = 4
_FEW = 16
"""Features that a task may need so few of: classes, or the one number of a regression."""


_ONE_OF_SLICES = (
    "an estimate: the {slices} slices run a program of backend XLASPMD, which is not traced. This is a replica of"
    " backend XLA on one of them; the exchange includes the sum over all slices, at the peak of the data-center network"
)


@dataclass(frozen=True)
class SliceCheck:
    """The trainer's answer for one slice, and the same in words. `cost`: None if nothing was compiled."""

    resolution: Resolution
    answer: Mapping[str, Any]
    result: CompileResult
    cost: Cost | None
    others: tuple["SliceCheck", ...] = ()
    """The same job on the alternatives whose steps are other programs."""

    @property
    def all_fit(self) -> bool:
        return all(check.result.fits for check in (self, *self.others))


def print_check(file: JobFile, checked: SliceCheck) -> None:
    from rich.markup import escape
    from rich.table import Table

    answer, out = checked.answer, console(_PIPE_WIDTH)
    batch = count(answer["batch"]["perReplica"], "example")
    out.print(f"[bold]{file.job.name}: {checked.resolution.layout}, {batch} per replica[/bold]", soft_wrap=True)
    out.print(_method(answer), soft_wrap=True)
    if (slices := checked.resolution.layout.slices) > 1:
        out.print(_ONE_OF_SLICES.format(slices=slices), soft_wrap=True)
    if flags := answer.get("flags"):
        out.print(f"flags: {escape(flags)}", style="dim", soft_wrap=True)
    for finding in checked.result.findings:
        out.print(f"[yellow]found:[/yellow] {escape(finding)}", soft_wrap=True)
    for line in filter(None, (checked.result.verdict, checked.result.largest_batch)):
        out.print(f"[bold]{escape(line)}[/bold]", soft_wrap=True)
    if refusal := answer.get("refusal"):
        out.print("the compiler says:")
        out.print(escape("\n".join(f"  {line}" for line in refusal.splitlines())), soft_wrap=True)
    if checked.result.bound is not None:
        table = Table()
        table.add_column("")
        table.add_column("per core", justify="right", style="bold")
        table.add_column("", style="dim", overflow="fold")
        for row in _rows(checked, checked.result.bound):
            table.add_row(*row)
        out.print(table)
    for other in checked.others:
        verdict = f"{other.resolution.layout}, an alternative: {other.result.verdict}"
        out.print(f"[bold]{escape(verdict)}[/bold]", soft_wrap=True)
    for line in _advice(answer):
        out.print(f"[yellow]advice:[/yellow] {escape(line)}", soft_wrap=True)


def print_comparison(file: JobFile, checked: Sequence[SliceCheck]) -> None:
    from rich.table import Table

    table = Table(
        title=f"{file.job.name}: compiled for {count(len(checked), 'slice')}, not run; speeds are bounds",
        title_justify="left",
        title_style="bold",
    )
    for name in ("", "batch", "fits", "HBM", "steps/s", "examples/s", "bound by", "MFU", "hours", "chip-hours"):
        table.add_column(name, justify="left" if name in ("", "fits", "bound by") else "right")
    for check in checked:
        table.add_row(*_comparison_cells(check))
    out = console(_PIPE_WIDTH)
    out.print(table)
    out.print(_method(checked[0].answer), soft_wrap=True)


def _comparison_cells(check: SliceCheck) -> Iterator[str]:
    result, bound, cost = check.result, check.result.bound, check.cost
    largest = result.step.largest_batch
    fits = {True: "yes", False: "no", None: "-"}[result.fits]
    yield str(check.resolution.layout)
    yield str(check.answer["batch"]["perReplica"])
    yield fits if largest is None else f"{fits}, {largest.fits:.0f} does"
    yield result.memory
    if bound is None or cost is None or cost.hours is None or cost.chip_hours is None or not result.fits:
        yield from "-" * 6
        return
    yield f"{1 / bound.seconds:.3g}"
    yield f"{check.resolution.recipe.batch.total / bound.seconds:.4g}"
    yield bound.by
    yield f"{bound.utilisation:.0%}"
    yield f"{cost.hours:.3g}"
    yield f"{cost.chip_hours:.3g}"


def _method(answer: Mapping[str, Any]) -> str:
    versions = answer["versions"]
    kept = "; the compiler's answer is that of an earlier check" if answer.get("kept") else ""
    return (
        f"traced by torch_xla {versions['torchXla']} for {count(answer['replicas'], 'replica')}, compiled for "
        f"{answer['generation']} {answer['topology']} by libtpu {versions['libtpu']}; not run{kept}"
    )


def _rows(checked: SliceCheck, bound: Bound) -> Iterator[tuple[str, str, str]]:
    memory, step = checked.answer["memory"], checked.answer["step"]
    in_place = memory["inPlace"]
    yield "arguments", gib(memory["arguments"]), f"{gib(in_place)} of them updated in place: weights, optimizer state"
    yield "temporaries", gib(memory["temporaries"]), "activations, gradients"
    yield "results", gib(memory["results"] - in_place), "besides what is updated in place"
    yield "program", gib(memory["code"]), ""
    yield "batches ahead", gib(memory["batchesAhead"]), "prepared while the device works"
    model = f"{step['modelFlops'] / 1e12:.4g} by the shapes of the model's products"
    yield "operations", f"{step['flops'] / 1e12:.4g} TFLOP", model
    yield "HBM traffic", f"{step['traffic'] / 1e9:.4g} GB", "what the schedule reads and writes"
    yield (
        "intensity",
        f"{bound.intensity:.3g} FLOP/byte",
        f"{bound.balance:.3g} is where memory stops being the limit",
    )
    yield "collectives", str(len(step["collectives"])), _collectives(step["collectives"])
    times = {"arithmetic": bound.arithmetic, "memory": bound.memory, "exchange": bound.network}
    parts = ", ".join(f"{name} {milliseconds(seconds)}" for name, seconds in times.items())
    yield "step at best", milliseconds(bound.seconds), f"bound by {bound.by}: {parts}, each at its peak"
    yield "without overlap", milliseconds(bound.serial), "the parts one after the other, each at its peak"
    yield "MFU at best", f"{bound.utilisation:.0%}", "model operations over the bf16 peak, if no step is slower"
    recipe, cost = checked.resolution.recipe, checked.cost
    if cost is not None and cost.hours is not None and cost.chip_hours is not None:
        steps = f"{recipe.train_steps} steps, {cost.chip_hours:.3g} chip-hours"
        yield "training at best", f"{cost.hours:.3g} hours", steps


def _collectives(collectives: Sequence[Mapping[str, Any]]) -> str:
    if not collectives:
        return ""
    texts = [f"{c['kind']} of {_mb(c['bytes'])} after {c['after']:.0%}" for c in collectives]
    waits = sum(bool(c.get("waits")) for c in collectives)
    wait = f"; the step waits for {'each' if waits == len(texts) else f'{waits} of them'}" if waits else ""
    return f"{several(texts, _MOST_COLLECTIVES)}; % of the matrix products before it{wait}"


def _advice(answer: Mapping[str, Any]) -> Iterator[str]:
    padding = answer.get("padding", {})
    for product in padding.get("products", []):
        if min(product["shape"]) > _FEW:
            computed = f"{product['name']} {product['shape']} is multiplied as {product['computed']}"
            yield f"{computed}: {product['waste']:.0%} of it is padding; make features multiples of 128"
    for tensor in padding.get("tensors", []):
        sizes = f"{_mb(tensor['padded'])} instead of {_mb(tensor['bytes'])}"
        yield f"{tensor['name']} {tensor['shape']} takes {sizes}, because of its tiles"
    step = answer.get("step")
    if step is not None and step["wideFlops"] > step["modelFlops"] * _LEAST_WIDE:
        share = step["wideFlops"] / step["modelFlops"]
        yield (
            f"{share:.0%} of the matrix products' operations read float32: with recipe.precision BFloat16Mixed they "
            "would move half of the bytes"
        )


def _mb(size: float) -> str:
    return f"{size / 1e6:.3g} MB"


def as_json(checked: SliceCheck) -> dict[str, Any]:
    document = {"slice": str(checked.resolution.layout), **checked.answer}
    bound = checked.result.bound
    if bound is not None and checked.cost is not None:
        document["atBest"] = {
            "stepSeconds": bound.seconds,
            "stepSecondsWithoutOverlap": bound.serial,
            "boundBy": bound.by,
            "arithmeticSeconds": bound.arithmetic,
            "memorySeconds": bound.memory,
            "exchangeSeconds": bound.network,
            "waitingSeconds": bound.waiting,
            "flopsPerByte": bound.intensity,
            "balanceFlopsPerByte": bound.balance,
            "modelFlopsUtilisation": bound.utilisation,
            **checked.cost.as_json(),
        }
    if checked.others:
        document["alternatives"] = [as_json(other) for other in checked.others]
    return document
