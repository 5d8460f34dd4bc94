"""Whether the operator is installed: what `helm test` asks, in a pod with the operator's image and account.

The kubelet knows whether the operator is ready, and the Deployment says so. That the API server serves TPUTrainingJob
is not enough: a definition that another version left behind drops the fields that it does not know, in silence. So the
definition in use is compared with the one of this version, field by field.
"""

import asyncio
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import click

from tpu_training_operator.api.constants import API_VERSION, KIND
from tpu_training_operator.api.crd import custom_resource_definition
from tpu_training_operator.kube.client import Client, ClientOptions, connect
from tpu_training_operator.kube.cluster import Object
from tpu_training_operator.kube.credentials import NoCredentials, load_credentials
from tpu_training_operator.kube.encoding import parsed
from tpu_training_operator.kube.errors import ApiError, Forbidden, NotFound
from tpu_training_operator.version import version

_SECONDS_BETWEEN_LOOKS = 1.0
_SILENT_SECONDS = 30.0
_MOST_FIELDS = 5
_INSTALL = "tpujob crd | kubectl apply --server-side -f -"


@dataclass(frozen=True)
class Answer:
    """`good`: nothing is wrong. `text`: what there is, or what is missing and what to do about it. `final`: waiting
    does not change it."""

    good: bool
    text: str
    final: bool = False


def of_deployment(deployment: Object) -> Answer:
    """Whether the newest pods of the operator are ready."""
    name, spec, status = deployment["metadata"]["name"], deployment["spec"], deployment.get("status", {})
    if spec["replicas"] == 0:
        return Answer(False, f"deployment {name} is paused: set the chart's value replicas to 1", final=True)
    is_current = status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0)
    ready = min(status.get("readyReplicas", 0), status.get("updatedReplicas", 0)) if is_current else 0
    if ready < spec["replicas"]:
        return Answer(False, f"deployment {name} is not ready: kubectl describe its pod, and read the pod's log")
    return Answer(True, f"the operator is ready: deployment {name}")


def of_definition(served: Object | None) -> Answer:
    """Whether the API server knows every field that this version reads or writes. `served`: its schema of a job."""
    what = f"{KIND} {API_VERSION}"
    if served is None:
        return Answer(False, f"the API server does not serve {what}: install it ({_INSTALL})")
    (wanted,) = custom_resource_definition()["spec"]["versions"]
    there = set(_fields(served))
    missing = [path for path in _fields(wanted["schema"]["openAPIV3Schema"]) if path not in there]
    if missing:
        shown = ", ".join(missing[:_MOST_FIELDS]) + (" and more" if len(missing) > _MOST_FIELDS else "")
        return Answer(False, f"the definition of {what} is another version's, without {shown}: replace it ({_INSTALL})")
    return Answer(True, f"the API server serves {what} with every field of version {version()}")


def _fields(schema: Object, above: str = "") -> Iterator[str]:
    """The paths of the fields below `schema`. What the API server itself adds to an object's metadata is left out."""
    for name, field in schema.get("properties", {}).items():
        path = f"{above}.{name}" if above else name
        yield path
        if path != "metadata":
            yield from _fields(field, path)
    for part in ("items", "additionalProperties"):
        if isinstance(schema.get(part), dict):
            yield from _fields(schema[part], above)


async def _look_at_deployment(client: Client, namespace: str, name: str) -> Answer:
    try:
        return of_deployment(await client.request("GET", f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}"))
    except NotFound:
        return Answer(False, f"namespace {namespace} has no deployment {name}")
    except Forbidden as error:
        return Answer(False, f"cannot tell whether the operator is ready: {error}")


async def _look_at_definition(client: Client) -> Answer:
    # The answer is no object and has no kind, which `request` would insist on.
    pieces = client.stream(f"/openapi/v3/apis/{API_VERSION}", {}, silent_seconds=_SILENT_SECONDS)
    try:
        schemas = parsed(b"".join([piece async for piece in pieces]))["components"]["schemas"]
    except NotFound:
        return of_definition(None)
    return of_definition(next((one for name, one in schemas.items() if name.endswith(f".{KIND}")), None))


async def _look(client: Client, namespace: str, name: str) -> list[Answer]:
    try:
        return [await _look_at_deployment(client, namespace, name), await _look_at_definition(client)]
    except ApiError as error:
        return [Answer(False, f"the API server does not answer as it should: {error}")]


async def _wait(namespace: str, deployment: str, seconds: float) -> list[Answer]:
    """The first answers that are all good or final, or else the last ones."""
    end = time.monotonic() + seconds
    async with connect(load_credentials(), ClientOptions(agent="tpu-training-operator-test")) as client:
        while True:
            answers = await _look(client, namespace, deployment)
            done = all(answer.good or answer.final for answer in answers)
            if done or time.monotonic() > end:
                return answers
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)


@click.command()
@click.option("--namespace", required=True, help="Namespace of the operator's Deployment.")
@click.option("--deployment", required=True, help="Name of the operator's Deployment.")
@click.option(
    "--wait", "seconds", type=click.FloatRange(min=0), default=120.0, show_default=True, help="Seconds to wait."
)
def main(namespace: str, deployment: str, seconds: float) -> None:
    """Wait until the operator is ready and its API is served; say what is missing otherwise."""
    try:
        answers = asyncio.run(_wait(namespace, deployment, seconds))
    except NoCredentials as error:
        raise click.ClickException(str(error)) from None
    for answer in answers:
        click.echo(f"{'ok' if answer.good else 'FAILED'}: {answer.text}")
    sys.exit(not all(answer.good for answer in answers))


if __name__ == "__main__":
    main()
