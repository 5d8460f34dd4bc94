"""What keeps a job from starting although its spec is valid: too many hosts, too much for a ConfigMap, no queue."""

from collections.abc import Sequence

from tpu_training_operator.api.constants import MAX_HOSTS
from tpu_training_operator.domain.cluster_state.observed import Object
from tpu_training_operator.domain.job.options import Option
from tpu_training_operator.domain.job.recipe.resolve import check_hosts
from tpu_training_operator.domain.objects.shared import check_config_map
from tpu_training_operator.domain.plan.queue.queueing import check_queue


def check_options(options: Sequence[Option], raw: Object, max_hosts: int = MAX_HOSTS) -> None:
    """Raises InvalidJob for a slice on which the job cannot start. `raw`: the job as the API server has it."""
    for option in options:
        check_hosts(option.resolution, max_hosts, option.choice.field)
        check_config_map(option.job, option.resolution)
        check_queue(raw, option.job)
