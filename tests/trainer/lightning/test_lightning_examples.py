"""Under Lightning's own Trainer a gang of any size ends with the weights of Lightning alone on the global batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cluster.ports import free_port
from tests.trainer import fork_server
from tests.trainer.gang_processes import Launcher, run_spec
from tests.trainer.lightning_examples import EXAMPLES, alone
from tests.trainer.lightning_gang import FOLDER, PORTS

# Lightning warns of what a user should think of, such as few workers.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_gang_of_any_size_ends_with_the_weights_of_lightning_alone(
    replicas: int, launcher: Launcher, tmp_path: Path
) -> None:
    ports = ",".join(str(free_port()) for _ in EXAMPLES)
    gang = launcher.start(
        run_spec(hosts=replicas, replicas=replicas),
        "tests.trainer.lightning_gang",
        packages=fork_server.FRAMEWORKS,
        **{FOLDER: str(tmp_path), PORTS: ports},
    )
    expected = {name: alone(name) for name in EXAMPLES}
    assert gang.wait() == [0] * replicas, gang.output()
    for name, (weights, metrics) in expected.items():
        (file,) = (tmp_path / name).glob("step-*/model.safetensors")
        torch.testing.assert_close(load_file(file), weights, rtol=1e-4, atol=1e-5, msg=f"{name}: other weights")
        measured = json.loads((tmp_path / name / "metrics.json").read_text())
        del measured["loss"]
        assert measured == pytest.approx(metrics, rel=1e-4), name
