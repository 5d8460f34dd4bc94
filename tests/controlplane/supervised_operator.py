"""An operator as it runs in its Deployment: with a pod's credentials, and restarted when it ends.

Its requests go to the given API server, which may be a `FaultyProxy`.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from tests.cluster.api import ApiClient, ApiError, Object, answers_ok
from tests.cluster.control_plane import ControlPlane
from tests.cluster.pod_process import mount_account
from tests.cluster.ports import LOOPBACK, free_port
from tests.cluster.processes import Process, wait_until
from tests.controlplane.forked_operator import start_operator
from tests.controlplane.operator_process import ACCOUNT, grant

_LOOK_SECONDS = 0.1
_START_SECONDS = 60.0
_STOP_SECONDS = 30.0


class SupervisedOperator:
    """One operator that serves one namespace; `exits` holds the exit codes of processes that ended by themselves.

    A kubelet would restart it after a growing pause; here it restarts at once.
    """

    def __init__(self, cluster: ControlPlane, namespace: str, host: str, port: int, name: str = "operator") -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._server = f"https://{host}:{port}"
        self._name = f"{name}-{namespace}"
        self._health_port = free_port()
        self._process: Process
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name=self._name, daemon=True)
        self.log_file = cluster.directory / f"{self._name}.log"
        self.exits: list[int] = []
        grant(cluster, namespace)
        self._account = cluster.directory / f"{self._name}.account"
        self.token_file = mount_account(self._account, self._new_token(), cluster.ca_file)

    def start(self) -> None:
        """Returns when the operator answers its health probe."""
        self._launch()
        self._child.wait_ready(self.is_healthy, timeout=_START_SECONDS)
        self._supervisor.start()

    def stop(self) -> None:
        self._stopping.set()
        self._supervisor.join()
        self._cluster.children.stop(self._name, grace=_STOP_SECONDS)

    def kill_and_start_again(self) -> None:
        """Kills it like a lost node or the OOM killer, without a chance to clean up."""
        with self._lock:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._cluster.children.stop(self._name, grace=0)
            self._launch()

    def is_healthy(self) -> bool:
        return answers_ok(f"http://{LOOPBACK}:{self._health_port}/healthz")

    def log(self) -> str:
        """The log of all its processes."""
        return self.log_file.read_text()

    @contextmanager
    def token_that_ends(self) -> Iterator[Callable[[], None]]:
        """Inside the block the token file holds a token that the yielded function revokes; afterwards, a valid one."""
        secrets = f"/api/v1/namespaces/{self._namespace}/secrets"
        anchor = self._cluster.api.call("POST", secrets, {"metadata": {"generateName": "anchor-"}})["metadata"]
        bound = {"apiVersion": "v1", "kind": "Secret", "name": anchor["name"], "uid": anchor["uid"]}
        token = self._new_token(boundObjectRef=bound)
        client = ApiClient(self._cluster.server, self._cluster.ca_file, token)

        def is_refused() -> bool:
            try:
                client.call("GET", f"/apis/tpu-operator.dev/v1alpha1/namespaces/{self._namespace}/tputrainingjobs")
            except ApiError as error:
                return error.status == 401
            return False

        def end_it() -> None:
            # A token ends with the object that it is bound to, except for a ten-second cache in the API server.
            self._cluster.api.call("DELETE", f"{secrets}/{anchor['name']}")
            wait_until(is_refused, timeout=_START_SECONDS, what="the token is refused")

        self.token_file.write_text(token)
        try:
            yield end_it
        finally:
            client.close()
            self.token_file.write_text(self._new_token())

    def _new_token(self, **spec: Object) -> str:
        return self._cluster.service_account_token(self._namespace, ACCOUNT, **spec)

    def _launch(self) -> None:
        arguments = ("--namespace", self._namespace, "--health-port", str(self._health_port))
        self._child = self._cluster.children.adopt(
            self._name, partial(start_operator, self._server, self._account, arguments)
        )
        self._process = self._child._process

    def _supervise(self) -> None:
        while not self._stopping.wait(_LOOK_SECONDS):
            with self._lock:
                if (code := self._process.poll()) is not None:
                    self.exits.append(code)
                    self._cluster.children.stop(self._name, grace=0)
                    self._launch()
