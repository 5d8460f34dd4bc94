"""Arithmetic in place that is traced the quick way makes torch's own program, and refuses what torch refuses."""

from __future__ import annotations

from tests.trainer.gang_processes import Launcher


def test_arithmetic_in_place_is_the_same_program_the_quick_way(launcher: Launcher) -> None:
    assert launcher.run_on_xla("tests.trainer.in_place_on_xla").endswith("different: [] accepted: []\n")
