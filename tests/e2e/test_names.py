"""The names by which the workers of a gang find each other, in the cluster's DNS."""

import json

from tests.cluster.deadlines import kubectl_timeout
from tests.cluster.processes import wait_until
from tests.e2e.space import HOSTS, Space, status
from tests.e2e.together import Story
from tests.stories import Stories

# A waiting limit; CoreDNS hears of a change at once.
SECONDS = 60.0
GANG = "import os; print(os.environ['TPU_WORKER_HOSTNAMES'])"
RESOLVE = """
import json, socket, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = socket.gethostbyname(name)
    except socket.gaierror:
        found[name] = None
print(json.dumps(found))
"""


def resolved(space: Space, attempt: int, *, by: str) -> dict[str, str | None]:
    """What a worker is told about the host names of an attempt."""
    names = [f"{attempt}-{host}.digits" for host in range(HOSTS)]
    names.append(f"{attempt}-0.digits.{space.name}.svc")
    found: dict[str, str | None] = json.loads(space.kubectl("exec", by, "--", "python3", "-c", RESOLVE, *names))
    return found


def addresses(space: Space, attempt: int) -> dict[str, str | None]:
    """The addresses that its pods have."""
    prefix = f"digits-{attempt}-0-"
    pods = {pod["metadata"]["name"]: pod["status"]["podIP"] for pod in space.pods()}
    found = {name.removeprefix(prefix): ip for name, ip in pods.items() if name.startswith(prefix)}
    leader = {f"{attempt}-0.digits.{space.name}.svc": found["0"]} if found else {}
    return {f"{attempt}-{host}.digits": ip for host, ip in found.items()} | leader


def workers_find_the_hosts_of_their_own_attempt_only(space: Space) -> None:
    space.apply_waiting()
    space.wait_running()
    first = addresses(space, 1)
    assert len(first) == HOSTS + 1
    wait_until(lambda: resolved(space, 1, by="digits-1-0-0") == first, timeout=SECONDS, what="attempt 1 has names")
    meets_by = space.kubectl("exec", "digits-1-0-1", "--", "python3", "-c", GANG).strip().split(",")
    assert [first[name] for name in meets_by] == [first[f"1-{host}.digits"] for host in range(HOSTS)]

    space.kubectl("delete", "pod", "digits-1-0-1", "--wait=false")
    space.kubectl("wait", "--for=jsonpath={.status.attempt}=2", "tpujob/digits", kubectl_timeout(120))
    space.wait_running()
    failure = status(space.cluster, namespace=space.name)["firstFailure"]
    deleted = ("digits-1-0-1", "Infrastructure", "PodDeleted")
    assert (failure["pod"], failure["class"], failure["reason"]) == deleted

    second = addresses(space, 2)
    wait_until(lambda: resolved(space, 2, by="digits-2-0-0") == second, timeout=SECONDS, what="attempt 2 has names")
    assert resolved(space, 1, by="digits-2-0-0") == dict.fromkeys(first)
    assert space.names("endpointslices") == ["digits-0"]


STORIES = {"own attempt only": Story.of_a_space(workers_find_the_hosts_of_their_own_attempt_only)}


def test_workers_find_the_hosts_of_their_own_attempt_only(stories: Stories) -> None:
    stories.end_of("own attempt only")
