"""What the trainer and whoever starts it have agreed on, apart from the run spec: exit codes, variables, limits.

Written once for the trainer's side; a contract test compares it with the operator's. The run spec itself is
`runspec-v1.schema.json`.
"""

from __future__ import annotations

from enum import IntEnum

RUN_SPEC_SCHEMA = "runspec/v1"

TERMINATION_MESSAGE_LIMIT = 4096
"""Bytes of a termination message that Kubernetes keeps."""


class ExitCode(IntEnum):
    """How a worker ended. The member's name is the `outcome` of the termination message.

    The numbers above 1 are those of sysexits.h, so that they do not meet the small codes of users' own
    programs.
    """

    Succeeded = 0
    UserError = 1
    PeerLost = 69
    InternalError = 70
    Hung = 71
    StorageFailed = 74
    Preempted = 75
    Diverged = 76
    BadSpec = 78


ENV_RUN_SPEC = "TPUJOB_RUN_SPEC"
ENV_NUM_HOSTS = "TPUJOB_NUM_HOSTS"
ENV_HOST_INDEX = "TPUJOB_HOST_INDEX"
ENV_MASTER_ADDR = "MASTER_ADDR"
ENV_MASTER_PORT = "MASTER_PORT"
ENV_TERMINATION_LOG = "TPUJOB_TERMINATION_LOG"
ENV_PROGRESS_FILE = "TPUJOB_PROGRESS_FILE"
ENV_REPORT_DIRECTORY = "TPUJOB_REPORT_DIRECTORY"
ENV_HANG_SECONDS = "TPU_TRAINER_HANG_SECONDS"
