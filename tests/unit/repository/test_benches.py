"""The benches load, so that a change of the product does not break them before somebody measures."""

import importlib
import pkgutil

import pytest

import bench

# Their frameworks take ten seconds to load.
SLOW = {"bench.trainer.accelerated", "bench.trainer.lightning"}
MODULES = {module.name for module in pkgutil.walk_packages(bench.__path__, "bench.")} - SLOW


@pytest.mark.parametrize("name", sorted(name for name in MODULES if not name.endswith("__main__")))
def test_a_bench_loads(name: str) -> None:
    importlib.import_module(name)
