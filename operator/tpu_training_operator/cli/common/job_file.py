"""Reads and checks a job from a file, or from standard input (`-`)."""

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml

from tpu_training_operator.api import meant
from tpu_training_operator.api.constants import KIND
from tpu_training_operator.api.decimals import number_in, put_numbers_for_texts
from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.model import Rule
from tpu_training_operator.api.validation import InvalidJob, Problem, parse_job
from tpu_training_operator.cli.common.errors import BadInput
from tpu_training_operator.cli.common.yaml_text import explain, load_all, read_text
from tpu_training_operator.domain.job.options import SliceOption, options_of
from tpu_training_operator.domain.job.recipe.resolve import Resolution
from tpu_training_operator.domain.job.rungs import ladder_warnings, lower_rungs_of
from tpu_training_operator.domain.plan.startable import check_options

# What people write, and what the API server adds to it.
_METADATA = (
    *("name", "namespace", "labels", "annotations", "finalizers", "ownerReferences", "generateName", "uid", "selfLink"),
    *("generation", "resourceVersion", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds"),
    "managedFields",
)
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_LABEL_FORM = "at most 63 letters, digits, '-', '_' and '.', with a letter or a digit at both ends"


@dataclass(frozen=True)
class JobFile:
    """A job as written (`body`), and checked and resolved for each slice that it may run on (`options`).
    `lower_rungs`: the rungs of its ladder below the job itself."""

    path: Path
    body: dict[str, Any]
    options: tuple[SliceOption, ...]
    lower_rungs: tuple[SliceOption, ...] = ()

    @property
    def job(self) -> TPUTrainingJob:
        return self.options[0].job

    @property
    def resolution(self) -> Resolution:
        """The recipe on spec.slice."""
        return self.options[0].resolution

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings about the job on spec.slice, and about its ladder."""
        return (*self.resolution.warnings, *ladder_warnings(self.lower_rungs, self.options[0]))


def filename_option(command: Callable[..., None]) -> Callable[..., None]:
    """Gives the command the job's file as `filename`: `tpujob plan job.yaml`, or with -f as in kubectl."""

    @click.argument("file", nargs=-1, metavar="FILE", type=click.Path(path_type=Path))
    @click.option(
        "-f",
        "--filename",
        "named",
        multiple=True,
        type=click.Path(path_type=Path),
        help="The job's YAML file, if it is not the argument; - for stdin.",
    )
    @functools.wraps(command)
    def with_file(file: tuple[Path, ...], named: tuple[Path, ...], **options: Any) -> None:
        command(filename=_only_file((*file, *named)), **options)

    return with_file


def _only_file(files: tuple[Path, ...]) -> Path:
    """Returns the only file. Raises UsageError for two, of which click would silently take the last."""
    context = click.get_current_context()
    if not files:
        raise click.UsageError(f"name the job's YAML file: {context.command_path} job.yaml")
    if len(files) > 1:
        raise click.UsageError(f"one file is needed; {len(files)} were given: {', '.join(map(str, files))}")
    return files[0]


def load(
    path: Path, *, except_rules: tuple[Rule, ...] = (), change: Callable[[dict[str, Any]], None] | None = None
) -> JobFile:
    """Reads the job, lets `change` modify its body, and checks it. Raises BadInput with every problem found."""
    body = _job_in(path)
    if change is not None:
        change(body)
    for field, text in put_numbers_for_texts(TPUTrainingJob, body):
        click.echo(f"warning: {field}: write the number without quotes, as {number_in(text)}", err=True)
    return check(path, body, except_rules=except_rules)


def check(path: Path, body: dict[str, Any], *, except_rules: tuple[Rule, ...] = ()) -> JobFile:
    """Checks the job in `body`, which was read from `path`. Raises BadInput with every problem found."""
    try:
        job = parse_job(body, except_rules=except_rules)
        if problems := list(_metadata_problems(job.metadata)):
            raise InvalidJob(problems)
        options, lower_rungs = options_of(job), lower_rungs_of(job)
        check_options((*options, *lower_rungs), body)
        return JobFile(path, body, options, lower_rungs)
    except InvalidJob as error:
        raise BadInput(path, error.problems) from None


def with_uid(job: TPUTrainingJob) -> TPUTrainingJob:
    """Gives the job a uid; the API server assigns the real one."""
    return with_metadata(job, uid="00000000-0000-0000-0000-000000000000")


def with_metadata(job: TPUTrainingJob, **fields: str) -> TPUTrainingJob:
    return TPUTrainingJob.model_validate(dict(job) | {"metadata": {**job.metadata, **fields}})


def _job_in(path: Path) -> dict[str, Any]:
    text = read_text(path)
    try:
        documents = [document for document in load_all(text) if document is not None]
    except yaml.MarkedYAMLError as error:
        raise BadInput(path, [Problem("", explain(error, text))]) from None
    except yaml.YAMLError as error:
        raise BadInput(path, [Problem("", f"not valid YAML: {' '.join(str(error).split())}")]) from None
    except ValueError as error:
        # A date such as 2024-13-45, or a number with thousands of digits.
        raise BadInput(path, [Problem("", f"not valid YAML: {error}")]) from None
    jobs = [document for document in documents if isinstance(document, dict) and document.get("kind") == KIND]
    candidates = jobs or documents
    if len(candidates) != 1 or not isinstance(candidates[0], dict) or candidates[0].get("kind") in _WRAPPERS:
        raise BadInput(path, [Problem("", f"the file must hold one {KIND}; it holds {_content(documents, len(jobs))}")])
    return candidates[0]


_WRAPPERS = {
    "List": "put each of its items into a file of its own",
    "Kustomization": "kubectl kustomize FOLDER prints the job that it makes",
}


def _content(documents: list[Any], jobs: int) -> str:
    if jobs:
        return f"{jobs} of them; give each a file of its own"
    kinds = [str(one.get("kind", "a mapping")) if isinstance(one, dict) else "" for one in documents]
    wrapper = next((f": {_WRAPPERS[kind]}" for kind in kinds if kind in _WRAPPERS), "")
    if any(isinstance(one, list) for one in documents):
        return "a list: leave out the '-' before apiVersion"
    return ("none, but " + ", ".join(kind or "plain text" for kind in kinds) if kinds else "nothing") + wrapper


def _metadata_problems(metadata: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields what the API server itself would refuse in the metadata; the operator never sees such a job."""
    for field in (field for field in metadata if field not in _METADATA):
        yield Problem(f"metadata.{field}", f"unknown field; known: {', '.join(_METADATA[:5])}")
    namespace = metadata.get("namespace")
    if namespace is not None and not (isinstance(namespace, str) and _NAMESPACE.fullmatch(namespace)):
        yield Problem("metadata.namespace", f"{namespace!r} is not a name of at most 63 characters of a-z, 0-9 and '-'")
    for field in ("labels", "annotations"):
        entries, path = metadata.get(field), f"metadata.{field}"
        if entries is not None and not isinstance(entries, Mapping):
            yield Problem(path, "must be a mapping of names to strings")
            continue
        for key, value in (entries or {}).items():
            if not isinstance(key, str) or not _KEY.fullmatch(key):
                yield Problem(path, f"{key!r} is not a name such as team or example.com/team: {_LABEL_FORM}")
            elif not isinstance(value, str):
                yield Problem(f"{path}.{key}", meant.text(value))
            elif field == "labels" and not _LABEL.fullmatch(value):
                yield Problem(f"{path}.{key}", f"{value!r} is not the value of a label: {_LABEL_FORM}")
