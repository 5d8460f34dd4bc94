"""Where and how often a job saves checkpoints."""

from tpu_training_operator.api.job import Checkpoint, TPUTrainingJob

_DEFAULT_MINUTES = 10


def folder(job: TPUTrainingJob, checkpoint: Checkpoint) -> str:
    """The job's own folder below `uri`.

    It is named after the job and not its uid, so that a job that was lost and applied again continues. The trainer
    compares the recipes and decides whether it may.
    """
    return f"{checkpoint.uri.rstrip('/')}/{job.namespace}/{job.name}"


def interval(checkpoint: Checkpoint) -> dict[str, int]:
    """The run spec's everySteps and everyMinutes, as far as they are given."""
    given = {"everySteps": checkpoint.every_steps, "everyMinutes": checkpoint.every_minutes}
    return {name: value for name, value in given.items() if value is not None} or {"everyMinutes": _DEFAULT_MINUTES}


def interval_text(checkpoint: Checkpoint) -> str:
    """The interval in words: "every 500 steps or 10 min"."""
    units = {"everySteps": "steps", "everyMinutes": "min"}
    return "every " + " or ".join(f"{value} {units[name]}" for name, value in interval(checkpoint).items())
