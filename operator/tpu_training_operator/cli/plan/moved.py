"""A job on other slices than its own, for `--compare` and for times that were measured there."""

from collections.abc import Iterable
from copy import deepcopy

from tpu_training_operator.api.slice import V2_NEEDS_CPU
from tpu_training_operator.api.validation import InvalidJob, Problem, parse_job
from tpu_training_operator.cli.common.changes import move
from tpu_training_operator.cli.common.errors import BadInput
from tpu_training_operator.cli.common.job_file import JobFile
from tpu_training_operator.domain.job.recipe.resolve import Resolution, resolve


def moved(file: JobFile, accelerator_types: Iterable[str], option: str) -> list[Resolution]:
    """Resolves the job as `--slice` moves it to each accelerator type that `option` names. Raises BadInput with a
    problem for each that it cannot run on."""
    results: list[Resolution] = []
    problems: list[Problem] = []
    for name in map(str.strip, accelerator_types):
        body = deepcopy(file.body)
        move(body, name)
        try:
            results.append(resolve(parse_job(body, except_rules=(V2_NEEDS_CPU,)).spec))
        except InvalidJob as error:
            problems += [Problem(f"{option} {name}", str(problem)) for problem in error.problems]
    if problems:
        raise BadInput(file.path, problems)
    return results
