"""What a task writes into the report itself, as through TensorBoard's writer or a Lightning logger."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.trainer.reporting.test_reporter import summaries
from tests.trainer.tasks import Network, examples, loss
from tests.trainer.whole_runs import Ran, run
from tpu_contract.protocol import ExitCode
from tpu_trainer import SummaryWriter, Task
from tpu_trainer.reporting import tensorboard
from tpu_trainer.task.board import ReportLogger


def wrote(write: Callable[[], None], directory: Path | None, tensor_board: bool = True) -> Ran:
    """A run of two replicas and two steps whose loss calls `write`."""

    def writing(model: nn.Module, batch: Any) -> Tensor:
        write()
        return loss(model, batch)

    report = {} if directory is None else {"report": {"uri": str(directory), "tensorBoard": tensor_board}}
    return run(lambda hp, rank: Task(Network(), examples(), writing), 2, trainSteps=2, **report)


def written(directory: Path) -> dict[str, list[Any]]:
    """The values of the event file by tag."""
    (file,) = directory.glob("events.out.tfevents.*")
    found: dict[str, list[Any]] = {}
    for step, value in summaries(file.read_bytes()):
        found.setdefault(value.tag, []).append((step, value))
    return found


def test_one_replica_writes_what_tensorboard_shows(tmp_path: Path) -> None:
    writer = SummaryWriter()

    def write() -> None:
        writer.add_scalar("number", torch.tensor(0.5), 7)
        writer.add_scalars("numbers", {"a": 1, "b": 2.0})
        writer.add_text("words", "so\ud800", global_step=3)
        writer.add_histogram("many", torch.tensor([1.0, 2.0, float("nan")]))

    ran = wrote(write, tmp_path)
    assert ran.outcomes[0].code is ExitCode.Succeeded, ran.outcomes[0].message
    found = written(tmp_path)
    assert [(step, value.simple_value) for step, value in found["number"]] == [(7, 0.5)] * 2
    # The step before the first one made, then the first.
    assert [step for step, _ in found["numbers/a"]] == [0, 1]
    assert found["words/text_summary"][0][1].tensor.string_val == [b"so?"]
    assert found["many"][0][1].histo.num == 2


def pixels(content: bytes) -> tuple[tuple[int, int], bytes]:
    """Width and height of a PNG file, and its bytes, row by row."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(content):
        (size,) = struct.unpack(">I", content[at : at + 4])
        kind, data = content[at + 4 : at + 8], content[at + 8 : at + 8 + size]
        assert struct.unpack(">I", content[at + 8 + size : at + 12 + size]) == (zlib.crc32(kind + data),)
        chunks[kind] = data
        at += 12 + size
    return struct.unpack(">II", chunks[b"IHDR"][:8]), zlib.decompress(chunks[b"IDAT"])


@pytest.mark.parametrize(
    ("image", "form", "size", "rows"),
    [
        (torch.tensor([[[0.0, 1.0], [0.5, 2.0]]]), "CHW", (2, 2), b"\0\0\xff\0\x7f\xff"),
        (np.array([[[1, 2, 3]]], np.uint8), "HWC", (1, 1), b"\0\1\2\3"),
        (torch.tensor([[float("nan"), -1.0, 1.0]]), "HW", (3, 1), b"\0\0\0\xff"),
    ],
)
def test_an_image_is_a_png_file(tmp_path: Path, image: Any, form: str, size: Any, rows: bytes) -> None:
    wrote(lambda: SummaryWriter().add_image("seen", image, 1, dataformats=form), tmp_path)
    (_, value), _ = written(tmp_path)["seen"]
    assert pixels(value.image.encoded_image_string) == (size, rows)


def test_a_logger_gives_its_numbers_to_all_that_shows_numbers(tmp_path: Path) -> None:
    def write() -> None:
        logger = ReportLogger()
        logger.log_metrics({"norm": torch.tensor([2.0])}, step=5)
        logger.log_hyperparams({"width": 64})

    ran = wrote(write, tmp_path)
    assert ran.outcomes[0].metrics["norm"] == 2.0
    (logged,) = json.loads((tmp_path / "history.json").read_text())["recorded"]["logged"]
    assert (logged["name"], logged["points"][0]["step"]) == ("norm", 5)
    text = written(tmp_path)["hyperparameters/text_summary"][0][1].tensor.string_val[0]
    assert b"| width | 64 |" in text


@pytest.mark.parametrize(
    ("directory", "reason"),
    [(False, "no place for the report is named"), (True, "spec.report.tensorBoard is not true")],
)
def test_without_an_event_file_the_run_says_once_that_nothing_is_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], directory: bool, reason: str
) -> None:
    ran = wrote(lambda: SummaryWriter().add_text("a", "b"), tmp_path if directory else None, tensor_board=False)
    assert ran.outcome.code is ExitCode.Succeeded
    assert capfd.readouterr().out.count(f"what the task writes for TensorBoard is not kept: {reason}") == 1


def test_what_a_task_writes_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "OWN_BYTES", 200)
    wrote(lambda: SummaryWriter().add_text("a", "b" * 100), tmp_path)
    assert len(written(tmp_path)["a/text_summary"]) == 1


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (lambda: SummaryWriter().add_image("a", torch.zeros(2, 2, 2)), "image has 1, 3 or 4 channels"),
        (lambda: SummaryWriter().add_image("a", torch.zeros(3, 2)), "must be CHW, HWC or HW"),
        (lambda: SummaryWriter().add_scalar("a", "much"), "number is needed, got a str"),
        (lambda: SummaryWriter().add_scalar("a", torch.zeros(2)), "number is needed, got shape [2]"),
        (
            lambda: SummaryWriter().add_figure("a", None),
            "no add_figure; it has add_h",
        ),
        (lambda: ReportLogger().log_table("a"), "tpu_trainer has no log_table"),
    ],
)
def test_what_cannot_be_written_is_an_error_of_the_task(tmp_path: Path, write: Callable[[], None], why: str) -> None:
    ran = wrote(write, tmp_path)
    assert ran.outcomes[0].code is ExitCode.UserError
    assert why in ran.outcomes[0].message


def test_outside_of_a_training_nothing_is_written() -> None:
    SummaryWriter().add_scalar("a", 1.0)
    ReportLogger().log_metrics({"a": 1.0})
