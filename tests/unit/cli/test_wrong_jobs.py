"""A refusal mends the file: it names the field, and says what would be right there."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.jobs import job_body
from tests.unit.wrong_jobs import DOUBTFUL_JOBS, OWN_LOOP, WRONG_FILES, WRONG_JOBS, WRONG_TEXTS
from tpu_training_operator.cli.common.errors import BadInput
from tpu_training_operator.cli.common.job_file import load


def refusal(folder: Path, text: str) -> list[str]:
    """Returns what `tpujob` says about the file, without its name."""
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadInput) as caught:
        load(path)
    return [line.removeprefix(f"{path}: ") for line in caught.value.message.splitlines()]


@pytest.mark.parametrize(("changes", "field", "right"), WRONG_JOBS)
def test_the_refusal_names_the_field_and_what_would_be_right(
    tmp_path: Path, changes: dict[str, Any], field: str, right: str
) -> None:
    lines = refusal(tmp_path, yaml.safe_dump(job_body(changes)))
    assert [line for line in lines if line.startswith(field) and right in line], lines


@pytest.mark.parametrize(("changes", "right"), DOUBTFUL_JOBS)
def test_what_the_cluster_takes_and_somebody_else_will_refuse_is_a_warning(
    tmp_path: Path, changes: dict[str, Any], right: str
) -> None:
    def told(changes: dict[str, Any]) -> list[str]:
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(job_body(changes)))
        return list(load(path).warnings)

    # What an own loop is told, whatever its command is.
    anyway = told(OWN_LOOP) if "spec.trainer.command" in changes else told({})
    new = [warning for warning in told(changes) if warning not in anyway]
    assert [right in warning for warning in new] == ([True] if right else [])


@pytest.mark.parametrize(("before", "after", "right"), WRONG_TEXTS)
def test_the_refusal_of_a_text_says_what_to_write(tmp_path: Path, before: str, after: str, right: str) -> None:
    text = yaml.safe_dump(job_body())
    assert before in text
    lines = refusal(tmp_path, text.replace(before, after))
    assert any(right in line for line in lines), lines


@pytest.mark.parametrize(("text", "right"), WRONG_FILES)
def test_the_refusal_of_a_file_says_what_it_holds(tmp_path: Path, text: str, right: str) -> None:
    lines = refusal(tmp_path, text)
    assert any(right in line for line in lines), lines
