"""The run spec, `runspec/v1`: what the trainer reads. Its written form is the JSON schema in `tpu_trainer`.

Called by `domain.gang` for the ConfigMap of an attempt; the contract tests hold both sides together.
"""

from typing import Any

from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.recipe import Optimizer
from tpu_training_operator.domain.resolve import Resolution
from tpu_training_operator.domain.scaling import plain

SCHEMA = "runspec/v1"


def run_spec(job: TPUTrainingJob, resolution: Resolution, attempt: int) -> dict[str, Any]:
    """The run spec of one attempt, equal for all of its workers. Only for jobs with an entrypoint."""
    layout, recipe, spec = resolution.layout, resolution.recipe, job.spec
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "job": {"namespace": job.namespace, "name": job.name, "uid": job.uid, "attempt": attempt},
        "entrypoint": spec.trainer.entrypoint,
        "backend": spec.trainer.backend.value.lower(),
        "hardware": spec.slice.hardware.value,
        "slice": {
            "generation": layout.shape.generation,
            "topology": layout.shape.topology,
            "slices": layout.slices,
            "hosts": layout.hosts,
            "replicas": layout.replicas,
        },
        "batch": {"global": recipe.global_batch_size, "perReplica": recipe.per_replica_batch_size},
        "trainSteps": recipe.train_steps,
        "warmupSteps": recipe.warmup_steps,
        "seed": spec.recipe.seed,
        "optimizer": _optimizer(spec.recipe.optimizer, plain(recipe.learning_rate)),
        "parameters": dict(sorted((spec.recipe.parameters or {}).items())),
    }
    if spec.data is not None:
        document["dataUri"] = spec.data.uri
    return document


def _optimizer(optimizer: Optimizer, learning_rate: str) -> dict[str, str]:
    given = optimizer.model_dump(by_alias=True, exclude_none=True)
    return given | {"learningRate": learning_rate}
