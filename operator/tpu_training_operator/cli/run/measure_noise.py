"""`tpujob run --measure-noise`: trains the recipe where it was tuned, and tells its gradient noise scale."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tpu_contract.noise_scale import MeasuredNoise, Window, measured_noise
from tpu_contract.run_spec import Loop
from tpu_training_operator.api.slice import SliceRef
from tpu_training_operator.api.validation import Problem
from tpu_training_operator.api.words import count
from tpu_training_operator.cli.common.changes import Body
from tpu_training_operator.cli.common.errors import CommandError
from tpu_training_operator.cli.common.job_file import JobFile, check
from tpu_training_operator.html_report.history import UnreadableHistory, parse_history

_SLICE = tuple(field.alias for field in SliceRef.model_fields.values())
_UNTOLD = (
    "the noise scale cannot be told: the gradients are lost in the noise, or the training has too few steps (50 at "
    "least)"
)


def measure_on_own_slice(body: Body) -> None:
    """Changes the job so that its recipe trains as it was tuned, on its own slice.

    Raises CommandError if another loop than the trainer's own would train it.
    """
    spec = body.get("spec")
    if not isinstance(spec, dict) or not isinstance(spec.get("recipe"), dict):
        # The check reports what is wrong.
        return
    trainer = spec.get("trainer")
    if isinstance(trainer, dict) and ("entrypoint" not in trainer or trainer.get("loop") == Loop.LIGHTNING):
        raise CommandError(
            "--measure-noise: only the trainer's own loop measures, so the job needs trainer.entrypoint and not"
            " trainer.loop: Lightning"
        )
    tuned = spec["recipe"].pop("tunedOn", None)
    if isinstance(tuned, dict) and isinstance(spec.get("slice"), dict):
        others = {name: value for name, value in spec["slice"].items() if name not in _SLICE}
        spec["slice"] = {**others, **tuned}
    for name in ("ladder", "placement"):
        spec.pop(name, None)
    spec["report"] = {**(spec.get("report") or {}), "gradientNoiseScale": True}
    spec["report"].pop("uri", None)


def keep_checkpoints_apart(file: JobFile, directory: Path) -> JobFile:
    """Puts the checkpoints into the run's directory. The job's own would continue a training that may be over, and must
    not be mixed with those of a measurement."""
    if file.job.spec.checkpoint is None:
        return file
    spec = file.body["spec"]
    spec["checkpoint"] = {**spec["checkpoint"], "uri": mkdtemp(prefix="checkpoints-", dir=directory.resolve())}
    return check(file.path, file.body)


def measurement_problem(file: JobFile) -> Problem | None:
    """Returns why the noise scale cannot be measured on this slice."""
    batch = file.resolution.recipe.batch
    share = batch.total // file.resolution.layout.hosts
    if file.resolution.layout.hosts > 1 or batch.accumulation > 1 or share % 2 == 0:
        return None
    return Problem(
        "spec.recipe.globalBatchSize",
        f"--measure-noise compares two batch sizes, and {count(share, 'example')} cannot be split in two; use an even"
        " batch",
    )


def read_noise(document: bytes | None) -> MeasuredNoise | None:
    """Returns the noise scale that the history of a run has; None if it was not measured, or cannot be told."""
    with suppress(UnreadableHistory):
        if document is not None:
            history = parse_history(document)
            windows = [Window(point.count, point.noise, point.signal) for point in history.noise]
            return measured_noise(windows, history.global_batch)
    return None


def noise_json(noise: MeasuredNoise | None) -> dict[str, Any] | None:
    if noise is None:
        return None
    parts = {"start": noise.start, "middle": noise.middle, "end": noise.end}
    return {
        "value": noise.whole.value,
        "error": noise.whole.error,
        **{name: {"value": part.value, "error": part.error} if part else None for name, part in parts.items()},
    }


def noise_lines(noise: MeasuredNoise | None) -> Iterator[str]:
    """Yields what the terminal shows of the noise scale, the line for the job last."""
    if noise is None:
        yield f"  noise      {_UNTOLD}"
        return
    thirds = {"start": noise.start, "middle": noise.middle, "end": noise.end}
    words = ", ".join(f"{name} {part if part else 'unknown'}" for name, part in thirds.items())
    yield f"  noise      scale {noise.whole} examples over the training; by thirds: {words}"
    yield f'  paste      recipe.gradientNoiseScale: "{noise.whole.text}"'
