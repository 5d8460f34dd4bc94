"""What keeps a job from starting although its spec is valid: too many hosts, too much for a ConfigMap, no queue."""

from collections.abc import Sequence

from tpu_training_operator.api.constants import MAX_HOSTS
from tpu_training_operator.domain.lifecycle.queueing import check_queue
from tpu_training_operator.domain.objects.shared import check_config_map
from tpu_training_operator.domain.observed import Object
from tpu_training_operator.domain.options import Option
from tpu_training_operator.domain.recipe.resolve import check_hosts


def check_options(options: Sequence[Option], raw: Object, max_hosts: int = MAX_HOSTS) -> None:
    """Raises InvalidJob for a slice on which the job cannot start. `raw`: the job as the API server has it."""
    for option in options:
        check_hosts(option.resolution, max_hosts, option.choice.field)
        check_config_map(option.job, option.resolution)
        check_queue(raw, option.job)
