"""What the API server refuses in a pod it lists in any order; what the job says about it stays the same."""

from itertools import permutations

import pytest

from tpu_training_operator.domain.cluster_state.obstacles import in_one_order, limit_range_remedy

WORKER = {
    "metadata": {"labels": {}},
    "spec": {"containers": [{"resources": {"requests": {"cpu": "84", "memory": "144G"}}}]},
}


@pytest.mark.parametrize(
    ("refused", "remedy"),
    [
        (
            [
                f'spec.containers[0].resources.requests: Invalid value: "{asked}": must be less than or equal to {most}'
                for asked, most in (("84", "cpu limit of 1"), ("144G", "memory limit of 2Gi"))
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
    refusals = [f'Pod "digits-1-0-0" is invalid: [{", ".join(order)}]' for order in permutations(refused)]
    assert all(limit_range_remedy(refusal, WORKER).endswith(remedy) for refusal in refusals)
    assert {in_one_order(refusal) for refusal in refusals} == {refusals[refused != sorted(refused)]}


@pytest.mark.parametrize(
    "refusal",
    [
        'pods "digits-1-0-0" is forbidden: maximum cpu usage per Container is 16, but limit is 84',
        'pods "digits-1-0-0" is forbidden: exceeded quota: small, requested: pods=1, used: pods=4, limited: pods=4',
        'pods "digits-1-0-0" is forbidden: violates PodSecurity "baseline:latest": host namespaces (hostNetwork=true)',
        "admission webhook said: [b, a]",
    ],
)
def test_any_other_refusal_stays_as_it_is(refusal: str) -> None:
    assert in_one_order(refusal) == refusal
