"""What keeps a job from starting although its spec is valid: too many hosts, too much for a ConfigMap, no queue."""

from collections.abc import Sequence

from tpu_training_operator.api import constants
from tpu_training_operator.api.constants import MAX_HOSTS
from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.slice import Hardware, ProvisioningType
from tpu_training_operator.api.validation import InvalidJob, Problem
from tpu_training_operator.domain.cluster_state.multikueue import check_one_slice
from tpu_training_operator.domain.cluster_state.observed import Object
from tpu_training_operator.domain.cluster_state.workload import queue_of
from tpu_training_operator.domain.job.options import SliceOption
from tpu_training_operator.domain.job.recipe.resolve import check_hosts
from tpu_training_operator.domain.objects.shared import check_config_map


def check_options(options: Sequence[SliceOption], raw: Object, max_hosts: int = MAX_HOSTS) -> None:
    """Raises InvalidJob for a slice on which the job cannot start. `raw`: the job as the API server has it."""
    for option in options:
        check_hosts(option.resolution, max_hosts, option.choice.field)
        check_config_map(option.job, option.resolution)
        check_one_slice(raw, option.job)
        _check_queue(raw, option.job)


def _check_queue(raw: Object, job: TPUTrainingJob) -> None:
    """Raises InvalidJob for a job that needs a queue and names none, and for fields that cannot be used in a queue."""
    trainer, provisioning = job.spec.trainer, job.spec.slice.provisioning
    if queue_of(raw):
        both = sorted({constants.LABEL_QUEUE, constants.LABEL_POD_GROUP} & (trainer.pod_labels or {}).keys())
        if both:
            message = (
                f"leave {' and '.join(both)} out: the job itself is in queue {queue_of(raw)}, and with these labels"
                " Kueue would count each worker twice"
            )
            raise InvalidJob([Problem("spec.trainer.podLabels", message)])
    elif (
        provisioning
        and provisioning.type is ProvisioningType.QUEUED
        # A job on CPUs provisions nothing.
        and job.spec.slice.hardware is Hardware.TPU
        and constants.ANNOTATION_PROVISIONING not in (trainer.pod_annotations or {})
    ):
        message = (
            f"queued provisioning needs a queue: name a LocalQueue in the job's label {constants.LABEL_QUEUE}, and its"
            " admission check makes the ProvisioningRequest (docs/kueue.md); or name a ProvisioningRequest of your own"
            f" in spec.trainer.podAnnotations, as {constants.ANNOTATION_PROVISIONING}"
        )
        raise InvalidJob([Problem("spec.slice.provisioning.type", message)])
