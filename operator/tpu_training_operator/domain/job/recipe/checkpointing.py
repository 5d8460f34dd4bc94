"""Where and how often a job saves checkpoints."""

from tpu_training_operator.api.job import Checkpoint, TPUTrainingJob
from tpu_training_operator.api.ladder import Begin
from tpu_training_operator.api.words import count, span

_DEFAULT_SECONDS = 600


def folder(job: TPUTrainingJob, checkpoint: Checkpoint) -> str:
    """Returns the job's own folder below `uri`.

    It is named after the job and not its uid, so that a job that was lost and created again continues. The trainer
    compares the recipes and decides whether it may.
    """
    return f"{checkpoint.uri.rstrip('/')}/{job.namespace}/{job.name}"


def rungs_folder(job: TPUTrainingJob, checkpoint: Checkpoint) -> str:
    """Returns the prefix of the folders of the ladder's rungs, one for each attempt. No job's name has a dot, so it is
    no job's folder."""
    return f"{folder(job, checkpoint)}.rungs/{job.uid}"


def left_by_rungs(job: TPUTrainingJob) -> str | None:
    """Returns the prefix of the folders in which lower rungs leave checkpoints, useless once the job has succeeded."""
    ladder, checkpoint = job.spec.ladder, job.spec.checkpoint
    if ladder is None or checkpoint is None:
        return None
    keeps_some = ladder.begin is Begin.CHECKPOINT or checkpoint.init_from is not None
    return f"{rungs_folder(job, checkpoint)}-" if keeps_some else None


def interval(checkpoint: Checkpoint) -> dict[str, int]:
    """Returns the run spec's everySteps and everySeconds, as far as they are set; if neither is, the default."""
    settings = {"everySteps": checkpoint.every_steps, "everySeconds": checkpoint.every_seconds}
    return {name: value for name, value in settings.items() if value is not None} or {"everySeconds": _DEFAULT_SECONDS}


def interval_text(checkpoint: Checkpoint) -> str:
    """Returns the interval in words: "every 500 steps or 10 min"."""
    every = interval(checkpoint)
    texts = {name: span(value) if name == "everySeconds" else count(value, "step") for name, value in every.items()}
    return "every " + " or ".join(texts.values())
