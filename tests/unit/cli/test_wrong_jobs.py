"""A refusal mends the file: it names the field, and says what would be right there."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.jobs import ABSENT, job_body
from tests.unit.wrong_jobs import WRONG_FILES, WRONG_JOBS, WRONG_TEXTS
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


@pytest.mark.parametrize(
    ("command", "right"),
    [
        (["python train.py"], "write [python, train.py]"),
        (["python", "train.py --lr 0.1"], "write [train.py, --lr, 0.1]"),
        (["bash", "-c", "python train.py --lr 0.1"], ""),
        (["python", "train.py", "a b"], ""),
        (["/opt/my programs/train"], ""),
    ],
)
def test_a_command_line_in_one_word_is_a_warning(tmp_path: Path, command: list[str], right: str) -> None:
    path = tmp_path / "job.yaml"
    own_loop = {"spec.trainer.entrypoint": ABSENT, "spec.trainer.command": command}
    path.write_text(yaml.safe_dump(job_body(own_loop)))
    told = [warning for warning in load(path).warnings if "as one word" in warning]
    assert [warning.rpartition(": ")[2] for warning in told] == ([right] if right else [])


def test_an_amount_of_memory_without_its_unit_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    resources = {"requests": {"memory": 16, "cpu": 4}, "limits": {"memory": 2**34}}
    path.write_text(yaml.safe_dump(job_body({"spec.trainer.resources": resources, "spec.trainer.sharedMemory": 8})))
    assert [text.partition(";")[0] for text in load(path).warnings] == [
        "trainer.resources.requests.memory is 16 bytes",
        "trainer.sharedMemory is 8 bytes",
    ]


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
