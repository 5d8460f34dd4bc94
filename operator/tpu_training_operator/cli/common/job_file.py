"""Reads a job from a file, or from standard input (`-`), for every command that takes `-f`."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml

from tpu_training_operator.api.constants import KIND
from tpu_training_operator.api.decimals import number_in, put_numbers_for_texts
from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.model import Rule
from tpu_training_operator.api.validation import InvalidJob, Problem, parse_job
from tpu_training_operator.cli.common.errors import BadInput
from tpu_training_operator.cli.common.metadata import metadata_problems
from tpu_training_operator.cli.common.yaml_text import load_all, read_text
from tpu_training_operator.domain.job.options import Option, options_of
from tpu_training_operator.domain.job.recipe.resolve import Resolution
from tpu_training_operator.domain.job.rungs import lower_rungs_of
from tpu_training_operator.domain.plan.startable import check_options


@dataclass(frozen=True)
class JobFile:
    """A job: as written (`body`), checked (`job`) and resolved, on each of the slices that it may run on.
    `lower_rungs`: the rungs of its ladder below the job itself."""

    path: Path
    body: dict[str, Any]
    options: tuple[Option, ...]
    lower_rungs: tuple[Option, ...] = ()

    @property
    def job(self) -> TPUTrainingJob:
        return self.options[0].job

    @property
    def resolution(self) -> Resolution:
        """On spec.slice."""
        return self.options[0].resolution


def filename_option(command: Callable[..., None]) -> Callable[..., None]:
    """The job's file as `filename`: `tpujob plan job.yaml`, or with -f as in kubectl."""

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
        command(filename=_only_one((*file, *named)), **options)

    return with_file


def _only_one(given: tuple[Path, ...]) -> Path:
    """Without this, click would silently take the last of two."""
    context = click.get_current_context()
    if not given:
        raise click.UsageError(f"name the job's YAML file: {context.command_path} job.yaml")
    if len(given) > 1:
        raise click.UsageError(f"one file is needed; {len(given)} were given: {', '.join(map(str, given))}")
    return given[0]


def load(
    path: Path, *, except_rules: tuple[Rule, ...] = (), change: Callable[[dict[str, Any]], None] | None = None
) -> JobFile:
    """The job in the file, after `change` has changed its body. Raises BadInput with every problem found."""
    body = _job_in(path)
    if change is not None:
        change(body)
    for field, text in put_numbers_for_texts(TPUTrainingJob, body):
        click.echo(f"warning: {field}: write the number without quotes, as {number_in(text)}", err=True)
    return check(path, body, except_rules=except_rules)


def check(path: Path, body: dict[str, Any], *, except_rules: tuple[Rule, ...] = ()) -> JobFile:
    """The job in `body`, which was read from `path`. Raises BadInput with every problem found."""
    try:
        job = parse_job(_with_namespace(body), except_rules=except_rules)
        if problems := list(metadata_problems(job.metadata)):
            raise InvalidJob(problems)
        options, lower_rungs = options_of(job), lower_rungs_of(job)
        check_options((*options, *lower_rungs), body)
        return JobFile(path, body, options, lower_rungs)
    except InvalidJob as error:
        raise BadInput(path, error.problems) from None


def _job_in(path: Path) -> dict[str, Any]:
    try:
        documents = [document for document in load_all(read_text(path)) if document is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise BadInput(path, [Problem("", f"{where}not valid YAML: {error.problem}")]) from None
    except yaml.YAMLError as error:
        raise BadInput(path, [Problem("", f"not valid YAML: {' '.join(str(error).split())}")]) from None
    except ValueError as error:
        # A date such as 2024-13-45, or a number with thousands of digits.
        raise BadInput(path, [Problem("", f"not valid YAML: {error}")]) from None
    jobs = [document for document in documents if isinstance(document, dict) and document.get("kind") == KIND]
    candidates = jobs or documents
    if len(candidates) != 1 or not isinstance(candidates[0], dict):
        found = f"{len(jobs)} of them" if jobs else "none"
        raise BadInput(path, [Problem("", f"the file must hold one {KIND}; it holds {found}")])
    return candidates[0]


def _with_namespace(body: dict[str, Any]) -> dict[str, Any]:
    metadata = body.get("metadata")
    if isinstance(metadata, dict) and metadata.get("namespace") is None:
        metadata["namespace"] = "default"
    return body
