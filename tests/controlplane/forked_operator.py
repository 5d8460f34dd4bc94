"""Runs an operator in a process that is forked from one that has imported it, which is most of its first CPU-seconds.

It finds its credentials as in a pod. The real command is started in tests/chart, with a kubeconfig, in
tests/unit/runtime/test_operator_start and for test_scale.
"""

import json
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

from tests.layers import STARTED_WITH
from tests.trainer import fork_server

_REPOSITORY = Path(__file__).parents[2]
_ORDER = "TEST_OPERATOR"


def start_operator(server: str, account: Path, arguments: tuple[str, ...], log: Path) -> fork_server.ForkedProcess:
    """Starts an operator that writes to `log`. `account`: the folder that `mount_account` has made."""
    where = urlsplit(server)
    variables = {"KUBERNETES_SERVICE_HOST": where.hostname, "KUBERNETES_SERVICE_PORT": str(where.port)}
    order = json.dumps([str(log), str(account), variables, arguments])
    process = fork_server.start(
        ("tpu_training_operator.main",), __name__, {**STARTED_WITH, _ORDER: order}, str(_REPOSITORY)
    )
    process.stdout.close()
    return process


def _main() -> None:
    # The operator's image has none.
    sys.modules["kubernetes"] = None
    from tpu_training_operator.kube import credentials
    from tpu_training_operator.main import main

    log, account, variables, arguments = json.loads(os.environ.pop(_ORDER))
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.update(variables)
    credentials._SERVICE_ACCOUNT = Path(account)
    sys.argv[1:] = arguments
    main()


if __name__ == "__main__":
    _main()
