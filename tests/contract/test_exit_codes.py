"""The exit codes: operator and trainer each have a table, and the two are equal."""

import pytest

from tests.contract.pods import ATTEMPT, ended_pod
from tpu_trainer.contract.protocol import ExitCode
from tpu_training_operator.api.run_policy import FailureClass
from tpu_training_operator.domain.cluster_state.observed import parse_time
from tpu_training_operator.domain.failures.first import first_failure
from tpu_training_operator.domain.failures.table import EXIT_CODE_CLASSES

LONG_AFTER = parse_time("2026-01-01T01:00:00Z")


def test_both_sides_have_the_same_codes_under_the_same_names() -> None:
    operators = {code: reason for code, (_, reason) in EXIT_CODE_CLASSES.items()}
    assert operators == {member.value: member.name for member in ExitCode if member is not ExitCode.Succeeded}


@pytest.mark.parametrize(
    ("code", "failure_class"),
    [
        (ExitCode.UserError, FailureClass.USER_ERROR),
        (ExitCode.BadSpec, FailureClass.USER_ERROR),
        (ExitCode.NotFinite, FailureClass.NOT_FINITE),
        (ExitCode.CheckpointUnusable, FailureClass.USER_ERROR),
        (ExitCode.StorageDenied, FailureClass.USER_ERROR),
        (ExitCode.PeerLost, FailureClass.INFRASTRUCTURE),
        (ExitCode.Preempted, FailureClass.PREEMPTION),
        (ExitCode.InternalError, FailureClass.UNKNOWN),
        (ExitCode.Hung, FailureClass.HANG),
        (ExitCode.StorageFailed, FailureClass.INFRASTRUCTURE),
        (ExitCode.Diverged, FailureClass.UNKNOWN),
    ],
)
def test_every_code_has_its_class(code: ExitCode, failure_class: FailureClass) -> None:
    failure = first_failure([ended_pod(code, "")], ATTEMPT, LONG_AFTER, settle_user_errors=False)
    assert (failure.failure_class, failure.reason, failure.exit_code) == (failure_class, code.name, code.value)


def test_success_is_not_a_failure() -> None:
    assert first_failure([ended_pod(ExitCode.Succeeded, "")], ATTEMPT, LONG_AFTER, settle_user_errors=False) is None
