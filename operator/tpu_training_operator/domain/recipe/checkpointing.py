"""How often a job saves itself, and what about its checkpoints should be known before it runs."""

from tpu_training_operator.api.job import Checkpoint, Spec, TPUTrainingJob

_DEFAULT_MINUTES = 10
# Volumes of the other kinds end with the pod, or cannot be written to.
_OUTLIVING_VOLUMES = ("persistent_volume_claim", "csi")


def folder(job: TPUTrainingJob, checkpoint: Checkpoint) -> str:
    """The job's own folder below `uri`. By name and not by uid: a job that was lost and is applied again continues.
    Whether it may is for the trainer to tell, which compares the recipes."""
    return f"{checkpoint.uri.rstrip('/')}/{job.namespace}/{job.name}"


def interval(checkpoint: Checkpoint) -> dict[str, int]:
    """The run spec's everySteps and everyMinutes, whichever are given: not scaled with the slice, because what they
    bound is lost time."""
    given = {"everySteps": checkpoint.every_steps, "everyMinutes": checkpoint.every_minutes}
    return {name: value for name, value in given.items() if value is not None} or {"everyMinutes": _DEFAULT_MINUTES}


def interval_text(checkpoint: Checkpoint) -> str:
    """The interval in words: "every 500 steps or 10 min"."""
    units = {"everySteps": "steps", "everyMinutes": "min"}
    return "every " + " or ".join(f"{value} {units[name]}" for name, value in interval(checkpoint).items())


def warnings(spec: Spec) -> list[str]:
    """What a cluster would make of the checkpoints, or of their absence; a run on this machine has none of it."""
    if spec.checkpoint is None:
        # A loop of the user's own may save itself where it likes.
        spot = spec.slice.provisioning is not None and spec.slice.provisioning.spot
        if spot and spec.trainer.entrypoint is not None:
            return ["spot slices are taken away: without spec.checkpoint a restart begins at step 0"]
        return []
    given = {"uri": spec.checkpoint.uri, "resumeFrom": spec.checkpoint.resume_from}
    return [
        f"spec.checkpoint.{field} {place} is inside the worker and is lost with it; mount a shared volume there"
        " (persistentVolumeClaim or csi) or use gs://bucket/path"
        for field, place in given.items()
        if place is not None
        and place.startswith("/")
        and not any(_is_inside(place, mount) for mount in _outliving_mounts(spec))
    ]


def _outliving_mounts(spec: Spec) -> list[str]:
    kept = {v.name for v in spec.trainer.volumes or () if v.model_fields_set & set(_OUTLIVING_VOLUMES)}
    return [mount.mount_path for mount in spec.trainer.volume_mounts or () if mount.name in kept]


def _is_inside(path: str, mount: str) -> bool:
    return f"{path}/".startswith(f"{mount.rstrip('/')}/")
