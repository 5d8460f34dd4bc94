"""`tpujob submit` creates a job on a cluster, and its code.

Code in a bucket is written before the job. A Secret is created after the job, which owns it; pods wait for it. So if
this command is interrupted, nothing is left behind that is never deleted, and running it again does the rest. With
`--replace` the cluster has checked the new job, and its code is in its bucket, before the old one is deleted.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from tpu_training_operator.api.constants import GROUP, KIND, PLURAL, RESOURCE_NAME
from tpu_training_operator.api.validation import InvalidJob, Problem, parse_job
from tpu_training_operator.cli.code.image_contents import image_warnings
from tpu_training_operator.cli.code.option import add_code, code_option, code_summary, code_warnings, pack_code
from tpu_training_operator.cli.code.packing import PackedCode
from tpu_training_operator.cli.code.place import IN_CLUSTER, holds_checkpoints, place_of, put, secret
from tpu_training_operator.cli.common.changes import apply_options, begin_from_scratch, set_option, slice_option
from tpu_training_operator.cli.common.cluster import ClusterProblem, Connection, Target, cluster_options
from tpu_training_operator.cli.common.errors import BadInput, program_name
from tpu_training_operator.cli.common.job_file import JobFile, check, filename_option, load, with_metadata
from tpu_training_operator.cli.common.terminal import print_document
from tpu_training_operator.cli.run.lifecycle import (
    FIELD_MANAGER,
    confirm,
    delete_and_wait,
    describe_job,
    steps_lost,
    where,
    yes_option,
)
from tpu_training_operator.cli.watch.job_view import job_view
from tpu_training_operator.cli.watch.watch import watch_to_the_end
from tpu_training_operator.domain.job.recipe.checkpointing import folder
from tpu_training_operator.domain.job.recipe.warnings import checkpoint_warnings
from tpu_training_operator.kube.cluster import JOBS, SECRETS, Object, resource_of
from tpu_training_operator.kube.errors import AlreadyExists, ApiError, InvalidRequest, NotFound, Unavailable

_RIGHTS = (
    f"get, create and delete {PLURAL}.{GROUP}; with --code also get, create and delete secrets; with --replace also"
    f" list and watch {PLURAL}.{GROUP} and pods"
)
_WRITE = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
_DRY_RUN = {"dryRun": "All"}


@dataclass(frozen=True)
class _Request:
    """Holds what to submit. `namespace`: the one that the file names. `code_to` and the rest: the options' values."""

    file: JobFile
    namespace: str | None
    packed: PackedCode | None
    code_to: str | None
    from_scratch: bool
    replaces: bool
    yes: bool
    watches: bool
    dry_run: bool
    output: str | None

    def say(self, text: str) -> None:
        """Prints for a person: to stderr if stdout is for a program."""
        click.echo(text, err=self.output is not None)


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
@click.option("--name", help="Give the job this name instead of metadata.name. It has checkpoints of its own.")
@click.option(
    "--replace", "replaces", is_flag=True, help="Delete a job of this name first, and wait until its workers are gone."
)
@yes_option
@click.option(
    "--from-scratch",
    is_flag=True,
    help="Begin at step 0 even if a job of this name has left checkpoints: they stay, and the new ones go to a new"
    " folder below checkpoint.uri.",
)
@click.option("--watch", "watches", is_flag=True, help="Follow the job until it ends, and exit as `tpujob watch` does.")
@click.option("--dry-run", is_flag=True, help="Let the cluster check the job, and create nothing.")
@click.option("-o", "--output", type=click.Choice(["name", "json", "yaml"]), help="Print the job as it was created.")
@cluster_options
def submit(
    filename: Path,
    code: Path | None,
    on_slice: str | None,
    values: tuple[str, ...],
    name: str | None,
    from_scratch: bool,
    target: Target,
    **options: Any,
) -> None:
    """Create a job on a cluster, with a folder of code if you like."""
    if options["code_to"] is not None and code is None:
        raise click.UsageError("--code-to says where the code goes; name the folder with --code")
    if options["watches"] and options["dry_run"]:
        raise click.UsageError("--dry-run creates no job that --watch could follow")

    def change(body: Object) -> None:
        apply_options(body, values, on_slice)
        if name is not None and isinstance(body.setdefault("metadata", {}), dict):
            body["metadata"]["name"] = name
        if from_scratch:
            begin_from_scratch(body)

    file = load(filename, change=change)
    named = file.body["metadata"].get("namespace")
    if target.namespace and named not in (None, target.namespace):
        problem = f"is {named!r}, and --namespace is {target.namespace!r}"
        raise BadInput(filename, [Problem("metadata.namespace", problem)])
    request = _Request(file, named, pack_code(file, code), from_scratch=from_scratch, **options)
    for warning in (
        *file.resolution.warnings,
        *checkpoint_warnings(file.job.spec, file.resolution.recipe.train_steps),
        *code_warnings(file, request.packed, [] if code is None else [code]),
        *image_warnings(file.job.spec.trainer, code, request.packed),
    ):
        click.echo(f"warning: {warning}", err=True)
    target.run(lambda connection: _submit(connection, request), _RIGHTS)


async def _submit(connection: Connection, request: _Request) -> int:
    connection = replace(connection, namespace=request.namespace or connection.namespace)
    file, packed = _placed(connection, request), request.packed
    old = await _job_to_replace(connection, request, file) if request.replaces else None
    code = file.job.spec.trainer.code
    if packed is not None and code is not None:
        request.say(code_summary(packed, code.uri))
    if request.dry_run:
        job, is_new = (file.body, True) if old is not None else await create_job(connection, file, dry_run=True)
        return await _tell(connection, request, job, "replaced" if old is not None else _done(job, is_new=is_new))
    if packed is not None and code is not None and code.secret is None:
        await asyncio.to_thread(put, packed.archive, code.uri)
    try:
        if old is not None:
            await delete_and_wait(connection, old)
        job, is_new = await create_job(connection, file)
    except (Unavailable, asyncio.CancelledError):
        if old is not None:
            click.echo(f"{program_name()}: run the same command again to create the new job", err=True)
        raise
    if packed is not None and code is not None and code.secret is not None:
        await _create_secret(connection, job, secret(code.secret, packed, job), is_new=is_new)
    if is_new and old is None and await asyncio.to_thread(holds_checkpoints, file.job, code):
        click.echo(f"warning: {_continues(file)}", err=True)
    return await _tell(connection, request, job, "replaced" if old is not None else _done(job, is_new=is_new))


def _done(job: Object, *, is_new: bool) -> str:
    if is_new:
        return "created"
    view = job_view(job, (), datetime.now(UTC))
    if view.is_over:
        return f"already exists, has ended ({view.state_word}) and is left as it is (--replace trains again)"
    return f"already exists ({view.state_word})" if view.state_word else "already exists"


def _placed(connection: Connection, request: _Request) -> JobFile:
    """Returns the job with its namespace and with the place of its code."""
    file, packed = request.file, request.packed
    file.body["metadata"]["namespace"] = connection.namespace
    if packed is not None:
        job = with_metadata(file.job, namespace=connection.namespace)
        add_code(file.body, packed, place_of(packed, job, request.code_to))
    return check(file.path, file.body)


async def _job_to_replace(connection: Connection, request: _Request, file: JobFile) -> Object | None:
    """Returns the job that is in the way, None if there is none, once the cluster would take the new job and the user
    agrees."""
    try:
        await _post(connection, file, dry_run=True)
        return None
    except AlreadyExists:
        # The API server refuses a wrong job before it looks for its name.
        pass
    try:
        there = await connection.client.get(JOBS, connection.namespace, file.job.name)
    except NotFound:
        return None
    code = file.job.spec.trainer.code
    if request.packed is not None and code is not None and code.secret is not None:
        with suppress(AlreadyExists):
            body = secret(code.secret, request.packed, there)
            await connection.client.request("POST", SECRETS.path(connection.namespace), body, _WRITE | _DRY_RUN)
    view = job_view(there, (), datetime.now(UTC))
    request.say(describe_job(view))
    if not request.from_scratch and (continues := _continues(file)):
        request.say(continues)
    if not view.is_being_deleted and not request.dry_run:
        question = f"Delete job {view.name} {where(connection)} and create it again?"
        confirm(" ".join(filter(None, (question, steps_lost(there, view)))), yes=request.yes)
    return there


def _continues(file: JobFile) -> str:
    """Returns a sentence about the checkpoints with which the job begins; empty if it keeps none."""
    checkpoint = file.job.spec.checkpoint
    if checkpoint is None:
        return ""
    return (
        f"job {file.job.name} continues from the newest checkpoint in {folder(file.job, checkpoint)}, if there is one:"
        " with weights that earlier code has trained, and not at all if the recipe or data.uri is another;"
        " --from-scratch begins at step 0"
    )


async def _tell(connection: Connection, request: _Request, job: Object, done: str) -> int:
    """Prints what became of the job, and follows it if asked to. Returns the exit status."""
    name = job["metadata"]["name"]
    if request.output == "name":
        click.echo(f"{RESOURCE_NAME}/{name}")
    elif request.output is not None:
        job["metadata"].pop("managedFields", None)
        print_document(job, request.output)
    if request.dry_run:
        request.say(f"job {name} {done} in namespace {connection.namespace} (dry run: nothing has changed)")
        return 0
    request.say(f"job {name} {done} in namespace {connection.namespace}")
    follow = f"{program_name()} watch {name} {connection.options}"
    if not request.watches:
        request.say(f"follow it with: {follow}")
        return 0
    try:
        return await watch_to_the_end(connection, name, err=request.output is not None)
    except asyncio.CancelledError:
        click.echo(f"{program_name()}: interrupted; the job goes on: {follow}", err=True)
        raise


async def create_job(connection: Connection, file: JobFile, *, dry_run: bool = False) -> tuple[Object, bool]:
    """Returns the job as stored, and whether it is new. A stored job with the same spec counts as created before."""
    namespace, name = file.job.namespace, file.job.name
    try:
        return await _post(connection, file, dry_run=dry_run), True
    except AlreadyExists:
        there = await connection.client.get(JOBS, namespace, name)
        if "deletionTimestamp" in there["metadata"]:
            raise ClusterProblem(
                f"job {name!r} in namespace {namespace!r} is being deleted: add --replace to wait for its end, or give"
                " the new job another name with --name"
            ) from None
        if not _is_same(there, file):
            raise ClusterProblem(
                f"there is already a job {name!r} in namespace {namespace!r}, with another spec or other code; add"
                " --replace to delete it first, or give the new job another name with --name"
                f"{'; after --replace ' * bool(continues := _continues(file))}{continues}"
            ) from None
        return there, False


async def _post(connection: Connection, file: JobFile, *, dry_run: bool) -> Object:
    """Creates the job. Raises AlreadyExists, and ClusterProblem for a job or a namespace that is wrong."""
    body = {key: value for key, value in file.body.items() if key != "status"}
    query = _WRITE | (_DRY_RUN if dry_run else {})
    try:
        return await connection.client.request("POST", JOBS.path(file.job.namespace), body, query)
    except InvalidRequest as error:
        raise ClusterProblem(f"{file.path}: the cluster refuses the job: {error}") from None
    except NotFound as error:
        if error.reason:
            raise ClusterProblem(f"there is no namespace {file.job.namespace!r}") from None
        raise


def _is_same(there: Object, file: JobFile) -> bool:
    try:
        return parse_job(there).spec == file.job.spec
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
