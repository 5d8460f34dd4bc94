"""What the API server refuses in a pod it lists in any order; the remedy for it stays the same."""

from itertools import permutations

import pytest

from tpu_training_operator.domain.cluster_state.obstacles import limit_range_remedy

WORKER = {
    "metadata": {"labels": {}},
    "spec": {"containers": [{"resources": {"requests": {"cpu": "84", "memory": "144G"}}}]},
}


@pytest.mark.parametrize(
    ("refused", "remedy"),
    [
        (
            [
                f'containers[0].resources.requests: Invalid value: "{asked}": must be less than or equal to {limit}'
                for asked, limit in (("84", "cpu limit of 1"), ("144G", "memory limit of 2Gi"))
            ],
            "set spec.trainer.resources.limits.cpu and spec.trainer.resources.limits.memory",
        ),
        (
            [
                "minimum memory usage per Container is 1Ti, but request is 144G",
                "maximum cpu usage per Container is 16, but limit is 84",
            ],
            "sets it (max, min): set cpu and memory within it in spec.trainer.resources",
        ),
        (
            [
                f"{resource} max limit to request ratio per Container is 1, but no limit is specified or limit is 0"
                for resource in ("cpu", "memory")
            ],
            "sets it (maxLimitRequestRatio): set cpu and memory in spec.trainer.resources",
        ),
    ],
    ids=["default", "bounds", "ratio"],
)
def test_a_limit_range_has_one_remedy_in_either_order(refused: list[str], remedy: str) -> None:
    for order in permutations(refused):
        said = limit_range_remedy(f'Pod "digits-1-0-0" is invalid: [{", ".join(order)}]', WORKER)
        assert said.endswith(remedy)
