"""nn.GRU, which torch_xla replaces by one of its own, is trained on XLA as elsewhere."""

from __future__ import annotations

import pytest

from tests.trainer.gang_processes import Launcher, start_replicas
from tests.trainer.loop.test_trajectories import CLOSE


@pytest.mark.parametrize("task", ["evaluated", "unfrozen"])
def test_what_is_below_a_gru_is_trained_whatever_ran_through_it_before(launcher: Launcher, task: str) -> None:
    # In processes of their own: importing torch_xla replaces nn.GRU for a whole process, and so for this one.
    on_xla, on_torch = (
        start_replicas(launcher, backend, 1, entrypoint=f"tests.trainer.recurrent:{task}", warmupSteps=0)
        for backend in ("xla", "torch")
    )
    assert on_torch.wait() == [0], on_torch.output()
    assert on_xla.wait() == [0], on_xla.output()
    assert len(on_torch.losses()) == 24
    assert on_xla.losses() == pytest.approx(on_torch.losses(), abs=CLOSE)
