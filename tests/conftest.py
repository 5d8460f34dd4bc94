"""Orders the tests by layer, spreads them over the workers of pytest-xdist, and reports what each layer took.

A layer that this machine cannot run is left out and named at the end. In CI that is an error: a green build means that
everything ran.
"""

import gc
import os
import re
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from syrupy.assertion import SnapshotAssertion
from xdist.scheduler import LoadScopeScheduling

from tests.cluster.shared import distrust
from tests.layers import LAYERS, ON_THE_SECOND_STACK

_ROOT = Path(__file__).parent
_BY_NAME = {layer.name: layer for layer in LAYERS}
_CHEAPEST_FIRST = {layer.name: index for index, layer in enumerate(LAYERS)}
# The layers that wait for a cluster start first, so that other workers compute while they wait; the modules of the last
# ones are short, so that all workers end together.
_LONGEST = ["e2e", "controlplane", "aot", "trainer", "chart", "cluster", "local", "planner"]
_LONGEST_FIRST = {name: index for index, name in enumerate(_LONGEST)}
# Each takes as long as a tenth of its layer or more, the first as half: at its end the other lanes would be idle.
_FIRST_OF_THEIR_LAYER = ("test_machine.py", "test_crashes.py", "test_strangers.py")

# A run starts hundreds of processes that import this project. They find it compiled, whatever the shell has asked for.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The lanes share the cores. With a thread for each core, which all wait for each other, torch takes twice the CPU time.
os.environ["OMP_NUM_THREADS"] = "1"

# Until the tests are collected all that is made stays: looking for garbage in it takes a third of that time.
gc.disable()

# No deadline, because a loaded machine is not a bug, and a blob to repeat a failure. The second stack is asked about
# torch, and not again about every corner of our own code.
_EXAMPLES = 10 if ON_THE_SECOND_STACK in os.environ else 100
settings.register_profile("tests", deadline=None, print_blob=True, max_examples=_EXAMPLES)
settings.load_profile("tests")

MEASURED = "measured"
"""The user property whose text is shown at the end of the run."""


@pytest.fixture(scope="session", autouse=True)
def folder_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Makes pytest's folder. The first call for one makes it, and two threads that do so at the same time fail."""
    tmp_path_factory.getbasetemp()


@pytest.fixture
def snapshot(snapshot: SnapshotAssertion, tmp_path_factory: pytest.TempPathFactory) -> SnapshotAssertion:
    """Compares texts with those that `make snapshots` wrote beside the test, without what differs between two runs."""
    directory = re.compile(re.escape(str(tmp_path_factory.getbasetemp())) + r"/[\w.-]+")
    port = re.compile(r"(?<=127\.0\.0\.1:)\d+")

    def repeatable(data: Any, path: Any) -> Any:
        return port.sub("PORT", directory.sub("TMP", data)) if isinstance(data, str) else data

    return snapshot.with_defaults(matcher=repeatable)


class FailuresAtOnce:
    """Names a test when it fails: pytest does so at the end of the run, which may be a quarter of an hour later."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            terminal.write_line(f"\nfailed: {report.nodeid}: {crash.message.splitlines()[0] if crash else ''}")


def pytest_configure(config: pytest.Config) -> None:
    # A shell's background job ignores it, and so would every process that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config))
    if os.environ.get("CI") and (left_out := _left_out()):
        raise pytest.UsageError("; ".join(f"layer {name} cannot run: {why}" for name, why in left_out.items()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    """A fixture that fails at its start or its end may leave traces in a cluster that the next file shares."""
    report = yield
    if report.failed and report.when != "call":
        distrust(f"the {report.when} of {item.nodeid} failed")
    return report


class Lanes(LoadScopeScheduling):
    """Sends tests that must share a worker to one: a cluster's tests, and elsewhere a module's.

    (`--dist loadgroup` would read marks, but finds none with this pytest.)
    """

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        layer = _BY_NAME[Path(module).parts[1]]
        return layer.name if layer.has_cluster else module

    def remove_node(self, node: Any) -> str | None:
        """Returns the test that ended its worker, and gives it to no other: it has failed."""
        units = self.assigned_work[node].values()
        ended_by = next((test for unit in units for test, is_done in unit.items() if not is_done), None)
        for unit in units:
            if ended_by in unit:
                unit[ended_by] = True
        super().remove_node(node)
        return ended_by


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Lanes:
    return Lanes(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = _left_out()
    if config.getoption("update_snapshots"):
        # Only these have something to write.
        items[:] = [item for item in items if "snapshot" in getattr(item, "fixturenames", ())]
    dropped = [item for item in items if _layer(item.path) in left_out]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    order = _LONGEST_FIRST if hasattr(config, "workerinput") else _CHEAPEST_FIRST
    items[:] = sorted(
        (item for item in items if _layer(item.path) not in left_out),
        key=lambda item: (order.get(_layer(item.path), len(order)), item.path.name not in _FIRST_OF_THEIR_LAYER),
    )


def pytest_collection_finish() -> None:
    # Nor will it be garbage later, when every search would go through millions of objects of torch and of pytest.
    gc.freeze()
    # What tests make is less than what they throw away at once, so that a search finds little.
    gc.set_threshold(20_000)
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    ran: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    for report in _reports(terminalreporter):
        name = Path(report.nodeid.partition("::")[0]).parts[1]
        ran[name] += report.when == "call" or report.outcome != "passed"
        seconds[name] += report.duration
    measured = [text for report in _reports(terminalreporter) for text in _measured(report)]
    if measured:
        terminalreporter.section("measured")
    for text in dict.fromkeys(measured):
        terminalreporter.line(text)
    left_out = _left_out()
    terminalreporter.section("layers")
    for layer in LAYERS:
        if layer.name in left_out:
            terminalreporter.line(f"{layer.name:<13} NOT RUN: {left_out[layer.name]}")
        elif ran[layer.name]:
            count = f"{ran[layer.name]:>4} tests {seconds[layer.name]:>6.0f} s"
            terminalreporter.line(f"{layer.name:<13} {count}   {layer.proves}")


def _left_out() -> dict[str, str]:
    """Why this machine cannot run a layer, by the layer's name."""
    return {layer.name: why for layer in LAYERS if (why := layer.missing())}


def _reports(terminalreporter: pytest.TerminalReporter) -> Iterator[pytest.TestReport]:
    """Reports of setup, call and teardown; modules that failed to import have no duration and are left out."""
    for reports in terminalreporter.stats.values():
        yield from (report for report in reports if isinstance(report, pytest.TestReport))


def _measured(report: pytest.TestReport) -> Iterator[str]:
    yield from (str(text) for name, text in report.user_properties if name == MEASURED)


def _layer(path: Path) -> str:
    name = path.relative_to(_ROOT).parts[0]
    assert name in _BY_NAME, f"tests/{name} is not a layer"
    return name
