"""Two operators that share a Lease, as their own processes: one works, and when it dies, the other takes over."""

import json
import socket
import ssl
from base64 import b64decode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.cluster.control_plane import ControlPlane
from tests.cluster.deadlines import deadline
from tests.cluster.kwok import cpu_nodes_for
from tests.cluster.namespaces import emptied_namespace
from tests.cluster.ports import LOOPBACK, free_port
from tests.cluster.processes import wait_until
from tests.controlplane.faults import Fault, Hold
from tests.controlplane.faulty_proxy import FaultyProxy
from tests.controlplane.jobs import Namespace, digits
from tests.controlplane.operator_process import ACCOUNT, OperatorProcess
from tests.stories import Group, Stories, selected, told_together
from tpu_training_operator.api.constants import CA_CERTIFICATE_KEY
from tpu_training_operator.runtime.leadership import LABEL_LEADS

NAME = "tpu-training-operator"
HERE = Path(__file__).parent
# For one answer.
SLOW_SECONDS = 3.3


class Pair:
    """Two operators, whose requests go to `server`. `ports`: of their progress services."""

    def __init__(self, space: Namespace, server: str) -> None:
        self._space = space
        prepare(space)
        self.ports = [free_port(), free_port()]
        self.operators = [
            OperatorProcess(
                space.cluster, space.name, f"operator-{number}", *arguments(space.name, number, port), server=server
            )
            for number, port in enumerate(self.ports)
        ]

    def leader(self) -> int:
        found: list[int] = []

        def one_works() -> bool:
            found[:] = [number for number, operator in enumerate(self.operators) if operator.works]
            return len(found) == 1

        wait_until(one_works, timeout=60, what="one of the operators works")
        return found[0]

    def labelled(self) -> list[str]:
        """The pods to which the Service leads."""
        found = self._space.kubectl("get", "pods", "-l", LABEL_LEADS, "-o", "jsonpath={.items[*].metadata.name}")
        return found.split()

    def transitions(self) -> int:
        return int(json.loads(self._space.kubectl("get", "lease", NAME, "-o", "json"))["spec"]["leaseTransitions"])


def arguments(namespace: str, number: int, port: int) -> tuple[str, ...]:
    own = f"{NAME}.{namespace}"
    return (f"--lease={own}", f"--pod-name=operator-{number}", f"--progress-service={own}", f"--progress-port={port}")


def prepare(space: Namespace) -> None:
    """What the chart creates besides the operators: a Lease and a Secret, both empty, the rights to them, and pods,
    which need not run here."""
    for file in ("lease_rbac.yaml", "progress_rbac.yaml"):
        space.kubectl("apply", "-f", str(HERE / file))
    group = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": space.name}
    roles = [("Role", f"{NAME}-lease"), ("Role", f"{NAME}-progress"), ("ClusterRole", f"{NAME}-progress")]
    objects = [
        {
            "apiVersion": f"{group}/v1",
            "kind": f"{kind}Binding",
            "metadata": {"name": f"{role}-{space.name}"},
            "roleRef": {"apiGroup": group, "kind": kind, "name": role},
            "subjects": [subject],
        }
        for kind, role in roles
    ]
    objects.append({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": f"{NAME}-tls"}})
    objects.append({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": NAME}})
    # No scheduler takes them. On a node that does not exist, the garbage collector would delete them after 40 s.
    pod = {"schedulerName": "none", "containers": [{"name": "operator", "image": "operator"}]}
    names = ("operator-0", "operator-1")
    objects += [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": pod} for name in names]
    space.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(objects))


def tell(story: Callable[[Namespace, Pair, FaultyProxy], None], cluster: ControlPlane) -> None:
    """In a namespace with two operators that run."""
    with emptied_namespace(cluster.api) as name, FaultyProxy(cluster, seed=0) as proxy:
        space = Namespace(cluster, name)
        pair = Pair(space, f"https://{proxy.host}:{proxy.port}")
        try:
            with ThreadPoolExecutor() as together:
                list(together.map(OperatorProcess.start, pair.operators))
            story(space, pair, proxy)
        except Exception as error:
            for operator in pair.operators:
                error.add_note(f"the log of {operator._name}:\n{operator.log()[-4000:]}")
            raise
        finally:
            for operator in pair.operators:
                # The story may have stopped it.
                with suppress(KeyError):
                    operator.stop()


def uids(space: Namespace) -> dict[str, str]:
    pods = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in space.pods()}
    return {name: uid for name, uid in pods.items() if name.startswith("digits-")}


def reaches_the_service(space: Namespace, port: int) -> bool:
    """Whether the port leads to a server with the certificate that workers trust."""
    secret = json.loads(space.kubectl("get", "secret", f"{NAME}-tls", "-o", "json"))
    trust = ssl.create_default_context(cadata=b64decode(secret["data"][CA_CERTIFICATE_KEY]).decode())
    try:
        with (
            socket.create_connection((LOOPBACK, port), timeout=deadline(10)) as connection,
            trust.wrap_socket(connection, server_hostname=f"{NAME}.{space.name}.svc"),
        ):
            return True
    except OSError:
        return False


def when_the_one_that_works_is_killed_the_other_takes_over(space: Namespace, pair: Pair, _: FaultyProxy) -> None:
    first = pair.leader()
    space.apply(digits(runPolicy={"restart": {"backoff": {"initialSeconds": 1}}}))
    space.wait_for_state("Running")
    assert reaches_the_service(space, pair.ports[first])
    assert pair.labelled() == [f"operator-{first}"]

    pair.operators[first].kill()
    space.finish("digits-1-0-1", exit_code=137)
    status = space.wait_for_state("Running", attempt=2)
    gang = uids(space)
    assert sorted(name for name in gang if name.startswith("digits-2-")) == [f"digits-2-0-{host}" for host in range(4)]
    assert status["restarts"]["byClass"] == [{"class": "Infrastructure", "count": 1}]
    assert reaches_the_service(space, pair.ports[1 - first])

    # The one that was killed is back, and waits. Then the other ends as in a rollout.
    pair.operators[first].start()
    assert not pair.operators[first].works
    wait_until(lambda: pair.labelled() == [f"operator-{1 - first}"], timeout=30, what="the label is right")
    pair.operators[1 - first].stop()
    wait_until(lambda: pair.operators[first].works, timeout=30, what="the first one works again")
    wait_until(lambda: pair.labelled() == [f"operator-{first}"], timeout=30, what="the label is right")
    for host in range(4):
        space.finish(f"digits-2-0-{host}")
    assert space.wait_for_state("Succeeded")["attempt"] == 2
    assert uids(space) == gang
    assert pair.transitions() == 3

    # It ends when it finds that it no longer leads, and its container is started again.
    taken = json.dumps({"spec": {"holderIdentity": "somebody else"}})
    space.kubectl("patch", "lease", NAME, "--type=merge", f"--patch={taken}")
    wait_until(lambda: pair.operators[first].exit_code == 0, timeout=30, what="it has ended by itself")
    assert "working: somebody else holds" in pair.operators[first].log()

    reasons = space.kubectl("get", "events.events.k8s.io", "-o", "jsonpath={.items[*].reason}").split()
    assert [reasons.count(reason) for reason in ("Restarting", "Succeeded")] == [1, 1]


def behind_an_api_server_that_takes_seconds_one_works_on(space: Namespace, pair: Pair, proxy: FaultyProxy) -> None:
    first = pair.leader()
    space.apply(digits(runPolicy={"restart": {"backoff": {"initialSeconds": 1}}}))
    space.wait_for_state("Running")
    with proxy.misbehaving(Fault("slow", lambda call: call.verb != "watch", Hold(SLOW_SECONDS / 2))):
        space.finish("digits-1-0-1", exit_code=137)
        assert space.wait_for_state("Running", attempt=2)["restarts"]["byClass"] == [
            {"class": "Infrastructure", "count": 1}
        ]
    assert pair.operators[first].exit_code is None
    assert pair.transitions() == 1


STORIES = {
    story.__name__: story
    for story in (
        behind_an_api_server_that_takes_seconds_one_works_on,
        when_the_one_that_works_is_killed_the_other_takes_over,
    )
}


@pytest.fixture(scope="module")
def stories(control_plane: ControlPlane, job_definition: None, request: pytest.FixtureRequest) -> Iterator[Stories]:
    chosen = {name: partial(tell, STORIES[name], control_plane) for name in selected(request, STORIES)}
    with cpu_nodes_for(control_plane, 8), told_together(Group(chosen, at_once=len(STORIES))) as told:
        yield told


@pytest.mark.parametrize("story", STORIES)
def test_of_two_operators_one_works(story: str, stories: Stories) -> None:
    stories.end_of(story)
