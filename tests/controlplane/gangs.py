"""One job of the control plane tests whose workers fail, and what must be true of it afterwards."""

from collections import Counter

from tests.controlplane.faulty_proxy import FaultyProxy
from tests.controlplane.jobs import Namespace, Object, digits

HOSTS = 2
# The minimum, so that no test waits.
_RESTART = {"limits": [{"class": "Infrastructure", "max": -1}], "backoff": {"initialSeconds": 1, "maxSeconds": 1}}


class Gang:
    """A job of 2 workers, so that one may exist without the other, that may restart without limit."""

    def __init__(self, space: Namespace, name: str) -> None:
        self._space = space
        self.name = name

    def create(self) -> None:
        job = digits(slice={"acceleratorType": "v5litepod-8"}, runPolicy={"restart": _RESTART})
        self._space.apply(job | {"metadata": {"name": self.name}})

    def fail(self, attempt: int, host: int = 1) -> None:
        """Kills one worker like the kernel."""
        self._space.finish(f"{self.name}-{attempt}-0-{host}", exit_code=137)

    def wait_until_running(self, attempt: int, timeout: float = 120) -> None:
        def reached() -> bool:
            found = self._job().get("status", {})
            return (found.get("state"), found.get("attempt")) == ("Running", attempt)

        self._space.wait(reached, f"{self.name} runs in attempt {attempt}", timeout)

    def must_have_restarted(self, times: int) -> None:
        """Exactly this often; only the last gang's workers are left, and the one that failed last, for its log."""
        found = self._job()["status"]
        failed = [found["lastFailure"]["pod"]] if times else []
        assert found["attempt"] == times + 1
        assert found["restarts"]["byClass"] == ([{"class": "Infrastructure", "count": times}] if times else [])
        # A pod that another operator created late, for an attempt that is over, may still be terminating.
        self._space.wait(
            lambda: self._pods() == sorted(failed + self._workers(times + 1)), f"only attempt {times + 1} is left"
        )

    def must_have_been_made_once(self, proxy: FaultyProxy) -> None:
        """The operator behind the proxy created no worker twice."""
        made = Counter(
            entry.call.name for entry in proxy.taken("create", "pods") if entry.call.name.startswith(f"{self.name}-")
        )
        assert made
        assert {worker: number for worker, number in made.items() if number > 1} == {}

    def resource_version(self) -> str:
        return str(self._job()["metadata"]["resourceVersion"])

    def _workers(self, attempt: int) -> list[str]:
        return [f"{self.name}-{attempt}-0-{host}" for host in range(HOSTS)]

    def _pods(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in self._space.pods(self.name)]

    def _job(self) -> Object:
        path = f"/apis/tpu-operator.dev/v1alpha1/namespaces/{self._space.name}/tputrainingjobs/{self.name}"
        return self._space.cluster.api.call("GET", path)
