"""Checks that the operator is installed: `helm test` runs it in a pod with the operator's image and account.

The Deployment shows whether the operator is ready. That the API server serves TPUTrainingJob is not enough: a
definition of another version silently drops the fields that it does not know. So the definition in use is compared with
the one of this version, field by field.
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
from tpu_training_operator.kube.encoding import decode
from tpu_training_operator.kube.errors import ApiError, Forbidden, NotFound
from tpu_training_operator.version import version

_SECONDS_BETWEEN_LOOKS = 1.0
_SILENT_SECONDS = 30.0
_MOST_FIELDS = 5
_INSTALL = "tpujob crd | kubectl apply --server-side -f -"


@dataclass(frozen=True)
class CheckResult:
    """The result of one check. `text`: what there is, or what is missing and what to do about it. `final`: waiting does
    not change it."""

    good: bool
    text: str
    final: bool = False


def check_deployment(deployment: Object) -> CheckResult:
    """Checks that the newest pods of the operator are ready."""
    name, spec, status = deployment["metadata"]["name"], deployment["spec"], deployment.get("status", {})
    if spec["replicas"] == 0:
        return CheckResult(False, f"deployment {name} is paused: set the chart's value replicas to 1", final=True)
    is_current = status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0)
    ready = min(status.get("readyReplicas", 0), status.get("updatedReplicas", 0)) if is_current else 0
    if ready < spec["replicas"]:
        return CheckResult(False, f"deployment {name} is not ready: kubectl describe its pod, and read the pod's log")
    return CheckResult(True, f"the operator is ready: deployment {name}")


def check_definition(served: Object | None) -> CheckResult:
    """Checks that the API server knows every field that this version reads or writes. `served`: its schema of a job."""
    what = f"{KIND} {API_VERSION}"
    if served is None:
        return CheckResult(False, f"the API server does not serve {what}: install it ({_INSTALL})")
    (wanted,) = custom_resource_definition()["spec"]["versions"]
    served_fields = set(_fields(served))
    missing = [path for path in _fields(wanted["schema"]["openAPIV3Schema"]) if path not in served_fields]
    if missing:
        fields = ", ".join(missing[:_MOST_FIELDS]) + (" and more" if len(missing) > _MOST_FIELDS else "")
        return CheckResult(
            False, f"the definition of {what} is another version's, without {fields}: replace it ({_INSTALL})"
        )
    return CheckResult(True, f"the API server serves {what} with every field of version {version()}")


def _fields(schema: Object, above: str = "") -> Iterator[str]:
    """Yields the paths of the fields below `schema`, without the metadata that the API server itself adds."""
    for name, field in schema.get("properties", {}).items():
        path = f"{above}.{name}" if above else name
        yield path
        if path != "metadata":
            yield from _fields(field, path)
    for part in ("items", "additionalProperties"):
        if isinstance(schema.get(part), dict):
            yield from _fields(schema[part], above)


async def _look_at_deployment(client: Client, namespace: str, name: str) -> CheckResult:
    try:
        return check_deployment(await client.request("GET", f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}"))
    except NotFound:
        return CheckResult(False, f"namespace {namespace} has no deployment {name}")
    except Forbidden as error:
        return CheckResult(False, f"cannot tell whether the operator is ready: {error}")


async def _look_at_definition(client: Client) -> CheckResult:
    # `request` would refuse the answer, which has no kind.
    pieces = client.stream(f"/openapi/v3/apis/{API_VERSION}", {}, silent_seconds=_SILENT_SECONDS)
    try:
        schemas = decode(b"".join([piece async for piece in pieces]))["components"]["schemas"]
    except NotFound:
        return check_definition(None)
    return check_definition(next((schema for name, schema in schemas.items() if name.endswith(f".{KIND}")), None))


async def _look(client: Client, namespace: str, name: str) -> list[CheckResult]:
    try:
        return [await _look_at_deployment(client, namespace, name), await _look_at_definition(client)]
    except ApiError as error:
        return [CheckResult(False, f"the API server does not answer as it should: {error}")]


async def _wait(namespace: str, deployment: str, seconds: float) -> list[CheckResult]:
    """Returns the first results that are all good or final, or else the last ones."""
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
