"""What the API server says to an update of a job's mutable fields, by the definition's schema and rules."""

from tpu_training_operator.api.job import Spec
from tpu_training_operator.api.validation import InvalidJob, parse_job
from tpu_training_operator.kube.cluster import Object


def accepts(before: Object, after: Object) -> bool:
    """A rule that the job broke before does not count."""
    try:
        old = parse_job(before, except_rules=Spec.rules).spec
        passed_over = tuple(
            rule for rule in Spec.rules if rule.at_creation and (not rule.is_mutable or rule.is_broken_by(old))
        )
        parse_job(after, except_rules=passed_over)
    except InvalidJob:
        return False
    return True
