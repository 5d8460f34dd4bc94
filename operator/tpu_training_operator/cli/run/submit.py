"""`tpujob submit` creates a job on a cluster, and its code.

Code in a bucket is written before the job. A Secret is created after the job, which owns it; pods wait for it. So if
this command is interrupted, nothing is left behind that is never deleted, and running it again does the rest.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import click

from tpu_training_operator.api.constants import GROUP, KIND, PLURAL
from tpu_training_operator.api.validation import InvalidJob, Problem, parse_job
from tpu_training_operator.cli.code.option import add_code, code_option, code_summary, code_warnings
from tpu_training_operator.cli.code.packing import PackedCode, pack
from tpu_training_operator.cli.code.place import IN_CLUSTER, place_of, put, secret
from tpu_training_operator.cli.common.changes import apply_options, set_option, slice_option
from tpu_training_operator.cli.common.cluster import ClusterProblem, Connection, Target, cluster_options
from tpu_training_operator.cli.common.errors import BadInput, program_name
from tpu_training_operator.cli.common.job_file import JobFile, check, filename_option, load, with_metadata
from tpu_training_operator.domain.job.recipe.warnings import checkpoint_warnings
from tpu_training_operator.kube.cluster import JOBS, SECRETS, Object, resource_of
from tpu_training_operator.kube.errors import AlreadyExists, ApiError, InvalidRequest, NotFound, Unavailable

_RIGHTS = f"get, create and delete {PLURAL}.{GROUP}; with --code also get, create and delete secrets"
# Not the operator's field manager, which owns fields of the same objects.
_WRITE = {"fieldManager": "tpujob", "fieldValidation": "Strict"}


@dataclass(frozen=True)
class _Request:
    """What to submit. `namespace`: the one that the file names. `code_to`: the option's value."""

    file: JobFile
    namespace: str | None
    packed: PackedCode | None
    code_to: str | None


@click.command()
@filename_option
@code_option
@click.option(
    "--code-to",
    metavar="PLACE",
    help=f"Where the code waits for the workers: gs://bucket/path, a directory that they mount, or {IN_CLUSTER}."
    f" Default: the job's folder below checkpoint.uri if that is a bucket, else {IN_CLUSTER}, which holds 1 MiB.",
)
@slice_option
@set_option
@cluster_options
def submit(
    filename: Path,
    code: Path | None,
    code_to: str | None,
    on_slice: str | None,
    values: tuple[str, ...],
    target: Target,
) -> None:
    """Create a job on a cluster, with a folder of code if you like."""
    if code_to is not None and code is None:
        raise click.UsageError("--code-to says where the code goes; name the folder with --code")
    file = load(filename, change=lambda body: apply_options(body, values, on_slice))
    named = file.body["metadata"].get("namespace")
    if target.namespace and named not in (None, target.namespace):
        problem = f"is {named!r}, and --namespace is {target.namespace!r}"
        raise BadInput(filename, [Problem("metadata.namespace", problem)])
    request = _Request(file, named, None if code is None else pack(code), code_to)
    for warning in (
        *file.resolution.warnings,
        *checkpoint_warnings(file.job.spec, file.resolution.recipe.train_steps),
        *code_warnings(file, request.packed),
    ):
        click.echo(f"warning: {warning}", err=True)
    target.run(lambda connection: _submit(connection, request), _RIGHTS)


async def _submit(connection: Connection, request: _Request) -> int:
    file, packed, code = request.file, request.packed, None
    namespace = request.namespace or connection.namespace
    file.body["metadata"]["namespace"] = namespace
    if packed is not None:
        add_code(file.body, packed, place_of(packed, with_metadata(file.job, namespace=namespace), request.code_to))
    file = check(file.path, file.body)
    if packed is not None:
        code = file.job.spec.trainer.code
        assert code is not None
        if code.secret is None:
            await asyncio.to_thread(put, packed.archive, code.uri)
        click.echo(code_summary(packed, code.uri))
    job, is_new = await create_job(connection, file)
    if packed is not None and code is not None and code.secret is not None:
        await _create_secret(connection, job, secret(code.secret, packed, job), is_new=is_new)
    name = file.job.name
    click.echo(f"job {name} {'created' if is_new else 'already exists'} in namespace {namespace}")
    click.echo(f"follow it with: {program_name()} watch {name} -n {namespace}")
    return 0


async def create_job(connection: Connection, file: JobFile) -> tuple[Object, bool]:
    """Returns the job as stored, and whether it is new. A stored job with the same spec counts as created before."""
    namespace, name = file.job.namespace, file.job.name
    body = {key: value for key, value in file.body.items() if key != "status"}
    try:
        return await connection.client.request("POST", JOBS.path(namespace), body, _WRITE), True
    except InvalidRequest as error:
        raise ClusterProblem(f"{file.path}: the cluster refuses the job: {error}") from None
    except NotFound as error:
        if error.reason:
            raise ClusterProblem(f"there is no namespace {namespace!r}") from None
        raise
    except AlreadyExists:
        there = await connection.client.get(JOBS, namespace, name)
        if not _is_same(there, file):
            raise ClusterProblem(
                f"there is already a job {name!r} in namespace {namespace!r}, with another spec or other code; delete"
                f" it first (kubectl delete {PLURAL} {name} -n {namespace}), or choose another metadata.name"
            ) from None
        return there, False


def _is_same(there: Object, file: JobFile) -> bool:
    try:
        return parse_job(there).spec == file.job.spec and "deletionTimestamp" not in there["metadata"]
    except InvalidJob:
        return False


async def _create_secret(connection: Connection, job: Object, body: Object, *, is_new: bool) -> None:
    """Creates the Secret `body`. If the cluster refuses it, deletes a job that was just created: it would wait for its
    code forever, and perhaps hold a slice."""
    try:
        await _replace_secret(connection, body, job["metadata"]["uid"])
    except Unavailable as error:
        raise ClusterProblem(f"the job still lacks its code: {error}; run the same command again") from None
    except ApiError as error:
        if is_new:
            meta = job["metadata"]
            await connection.client.delete(JOBS, meta["namespace"], meta["name"], meta["uid"])
        what = "so the job was removed" if is_new else f"the {KIND} waits for it"
        raise ClusterProblem(f"the cluster refuses the Secret with the code, {what}: {error}") from None


async def _replace_secret(connection: Connection, body: Object, uid: str) -> None:
    """Creates the Secret, and replaces one that an earlier job of this name left behind."""
    client, resource, meta = connection.client, resource_of(body), body["metadata"]
    path = SECRETS.path(meta["namespace"])
    try:
        await client.request("POST", path, body, _WRITE)
    except AlreadyExists as refusal:
        there = (await client.get(resource, meta["namespace"], meta["name"]))["metadata"]
        owners = [owner for owner in there.get("ownerReferences") or () if owner.get("kind") == KIND]
        if any(owner["uid"] == uid for owner in owners):
            return
        if not owners:
            raise refusal
        await client.delete(resource, meta["namespace"], meta["name"], there["uid"])
        await client.request("POST", path, body, _WRITE)
