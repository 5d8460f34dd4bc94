"""Orders the tests by layer, leaves out what this machine cannot run, and says so at the end.

Under CI a layer that cannot run is an error: a green build means that everything ran.
"""

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.layers import LAYERS, Layer

_ROOT = Path(__file__).parent
_ORDER = {layer.name: index for index, layer in enumerate(LAYERS)}
_BY_NAME = {layer.name: layer for layer in LAYERS}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _ORDER[_layer(item.path).name])
    left_out = {layer.name: why for layer in {_layer(item.path) for item in items} if (why := layer.missing())}
    if left_out and os.environ.get("CI"):
        raise pytest.UsageError("; ".join(f"layer {name} cannot run: {why}" for name, why in left_out.items()))
    config.stash[_LEFT_OUT] = left_out
    dropped = [item for item in items if _layer(item.path).name in left_out]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    ran: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.getreports(outcome):
            layer = Path(report.nodeid.partition("::")[0]).parts[1]
            ran[layer] += 1
            # A module that could not even be imported took no time.
            seconds[layer] += getattr(report, "duration", 0.0)
    left_out = config.stash.get(_LEFT_OUT, {})
    terminalreporter.section("layers")
    for layer in LAYERS:
        if layer.name in left_out:
            terminalreporter.line(f"{layer.name:<13} NOT RUN: {left_out[layer.name]}")
        elif ran[layer.name]:
            count = f"{ran[layer.name]:>4} tests {seconds[layer.name]:>6.0f} s"
            terminalreporter.line(f"{layer.name:<13} {count}   {layer.proves}")


_LEFT_OUT: pytest.StashKey[dict[str, str]] = pytest.StashKey()


def _layer(path: Path) -> Layer:
    return _BY_NAME[path.relative_to(_ROOT).parts[0]]
