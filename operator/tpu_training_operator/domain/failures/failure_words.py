"""A failure in words: which worker, where, and what was wrong. The same in conditions, events and on the terminal."""

from tpu_training_operator.api.run_policy import FailureClass
from tpu_training_operator.api.status import Failure
from tpu_training_operator.domain.failures.last_words import one_line


def failed_where(failure: Failure) -> str:
    """slice 0 host 2 on node-1"""
    return f"slice {failure.slice} host {failure.host}" + (f" on {failure.node}" if failure.node else "")


def failed_why(failure: Failure) -> str:
    """Infrastructure (Killed, exit code 137); UserError (exit code 1), where class and reason are the same word."""
    details = [failure.reason] if failure.reason != failure.failure_class else []
    if failure.exit_code is not None:
        details.append(f"exit code {failure.exit_code}")
    return f"{failure.failure_class} ({', '.join(details)})" if details else str(failure.failure_class)


def gist(failure: Failure) -> str:
    """One line of the message. Below what was found of a hang stand the stacks."""
    if failure.failure_class is FailureClass.HANG:
        return failure.message.partition("\n")[0]
    return one_line(failure.message)


def describe(failure: Failure) -> str:
    """Which worker failed, where, and how."""
    node = f" on {failure.node}" if failure.node else ""
    where = f"slice {failure.slice} host {failure.host} ({failure.pod}{node})"
    return f"{where} failed with {failed_why(failure)}: {gist(failure)}"
