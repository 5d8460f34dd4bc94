"""nn.GRU, which torch_xla replaces by one of its own, is trained on XLA as elsewhere."""

from __future__ import annotations

import pytest

from tests.trainer import recurrent
from tests.trainer.gang import Launcher, start_replicas
from tests.trainer.test_clipping import SGD
from tests.trainer.test_trajectories import CLOSE
from tests.trainer.whole_runs import run


@pytest.mark.parametrize("task", ["evaluated", "unfrozen"])
def test_what_is_below_a_gru_is_trained_whatever_ran_through_it_before(launcher: Launcher, task: str) -> None:
    gang = start_replicas(launcher, "xla", 1, entrypoint=f"tests.trainer.recurrent:{task}", warmupSteps=0)
    expected = run(lambda hp, rank: getattr(recurrent, task)(hp), recipe=SGD, trainSteps=24)
    assert gang.wait() == [0], gang.output()
    assert gang.losses() == pytest.approx(expected.losses, abs=CLOSE)
