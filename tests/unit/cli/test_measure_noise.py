"""`tpujob run --measure-noise`: what is trained, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from tests.contract.jobs import job_body
from tpu_contract.noise_scale import MeasuredNoise, NoiseScale
from tpu_training_operator.cli.main import main
from tpu_training_operator.cli.run.measure_noise import measure_on_own_slice, noise_json, noise_lines

MEASURED = MeasuredNoise(NoiseScale(135.4, 12.3), NoiseScale(62.0, 5.0), NoiseScale(96.0, 9.0), None)


def test_the_recipe_trains_on_the_slice_on_which_it_was_tuned() -> None:
    spec: dict[str, Any] = {
        "slice": {"acceleratorType": "v5litepod-64", "count": 2, "hardware": "CPU"},
        "recipe": {"tunedOn": {"acceleratorType": "v5litepod-4"}, "globalBatchSize": 32},
        "ladder": {},
        "placement": {},
        "report": {"uri": "gs://bucket/run", "tensorBoard": True},
    }
    measure_on_own_slice({"spec": spec})
    assert spec == {
        "slice": {"acceleratorType": "v5litepod-4", "hardware": "CPU"},
        "recipe": {"globalBatchSize": 32},
        "report": {"tensorBoard": True, "gradientNoiseScale": True},
    }


def test_the_terminal_shows_the_thirds_and_the_line_to_paste() -> None:
    assert [*noise_lines(MEASURED)] == [
        "  noise      scale 135 +- 12 examples over the training; by thirds: "
        "start 62 +- 5, middle 96 +- 9, end unknown",
        '  paste      recipe.gradientNoiseScale: "135"',
    ]
    assert "cannot be told" in "".join(noise_lines(None))


def test_the_result_has_the_numbers() -> None:
    document = noise_json(MEASURED)
    assert document is not None
    assert (document["value"], document["error"], document["end"]) == (135.4, 12.3, None)
    assert document["start"] == {"value": 62.0, "error": 5.0}
    assert noise_json(None) is None


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({"recipe.globalBatchSize": 33}, (), "33 examples cannot be split in two"),
        ({}, ("--slice", "v5litepod-4"), "leave out --slice"),
        ({"trainer.entrypoint": ..., "trainer.command": ["python", "a.py"]}, (), "needs trainer.entrypoint"),
        ({"trainer.loop": "Lightning"}, (), "not trainer.loop: Lightning"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_it_runs(
    tmp_path: Path, changes: dict[str, Any], options: tuple[str, ...], said: str
) -> None:
    on_one_host = {"slice.acceleratorType": "v5litepod-1"}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_body(on_one_host | changes)))
    ran = CliRunner().invoke(
        main, ["run", str(path), "--measure-noise", "--output-dir", str(tmp_path / "run"), *options]
    )
    assert ran.exit_code != 0
    assert said in " ".join(ran.output.split())
