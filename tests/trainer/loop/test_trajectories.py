"""A run's losses do not depend on how many replicas it runs on, nor on the way they run."""

from __future__ import annotations

import re

import pytest

from tests.trainer import plain
from tests.trainer.counting_compilations import EVERY
from tests.trainer.gang_processes import KINDS, Gang, Launcher, run_spec, start_replicas

CLOSE = 1e-5
"""Float32 sums in another order differ by some 1e-7; a wrong batch, rate or mean by 1e-2."""


def assert_follows_reference(gang: Gang, optimizer: str) -> None:
    assert set(gang.wait()) == {0}, gang.output()
    expected = plain.small(optimizer)
    assert gang.losses() == pytest.approx(expected, abs=CLOSE)


@pytest.mark.parametrize(
    ("kind", "replicas", "optimizer"),
    [
        (kind, *layout)
        for kind in KINDS
        # A process costs more than a device. AdamW would not see a sum in place of a mean.
        for layout in [(1, "adamw"), (4 if kind in ("torch", "xla") else 8, "sgd")]
    ],
)
def test_losses_equal_plain_pytorch_on_the_whole_batch_and_every_example_is_evaluated_once(
    launcher: Launcher, kind: str, replicas: int, optimizer: str
) -> None:
    gang = start_replicas(launcher, kind, replicas, optimizer=optimizer, entrypoint="tests.trainer.tasks:counted")
    assert_follows_reference(gang, optimizer)
    expected = {"weight": sum(0.5 ** (i % 8) for i in range(37)) / 37, "first": 1 / 37}
    for host in gang.hosts:
        metrics = host.message()["metrics"]
        assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_evaluations_during_training_do_not_change_it(launcher: Launcher) -> None:
    recipe = {"entrypoint": "tests.trainer.tasks:counted", "hosts": 2}
    unevaluated, evaluated = (launcher.start(run_spec(**recipe, **more)) for more in ({}, {"evaluateEverySteps": 10}))
    assert {*unevaluated.wait(), *evaluated.wait()} == {0}, evaluated.output()
    assert evaluated.losses() == unevaluated.losses()
    assert [made["step"] for made in evaluated.recorded().evaluations] == [10, 20, 24]


@pytest.mark.parametrize("backend", ["torch", "xla"])
def test_all_hosts_start_from_host_0s_weights(launcher: Launcher, backend: str) -> None:
    gang = launcher.start(run_spec(backend=backend, hosts=2, entrypoint="tests.trainer.tasks:uneven_start"))
    assert_follows_reference(gang, "sgd")


@pytest.mark.parametrize(
    ("backend", "hosts", "optimizer"), [("xla", 1, "adafactor"), ("xla", 2, "sgd"), ("xla-spmd", 1, "lion")]
)
def test_xla_compiles_in_the_first_steps_only(launcher: Launcher, backend: str, hosts: int, optimizer: str) -> None:
    steps = 80
    task = {"entrypoint": "tests.trainer.counting_compilations:task"}
    gang = launcher.start(run_spec(backend=backend, hosts=hosts, trainSteps=steps, optimizer=optimizer, **task))
    assert set(gang.wait()) == {0}, gang.output()
    assert_compiles_no_more(gang, steps)


def test_a_step_that_xla_skips_is_no_program_of_its_own(launcher: Launcher) -> None:
    steps, task = 80, {"entrypoint": "tests.trainer.counting_compilations:spoilt"}
    gang = launcher.start(run_spec(backend="xla", hosts=2, trainSteps=steps, onNotFinite="Skip", **task))
    assert set(gang.wait()) == {0}, gang.output()
    # Later than the first count.
    skipped = [int(step) for step in re.findall(r"step (\d+) was skipped", gang.hosts[0].output)]
    assert len(skipped) > 0
    assert min(skipped) > EVERY
    assert_compiles_no_more(gang, steps)


def assert_compiles_no_more(gang: Gang, steps: int) -> None:
    """After the first EVERY steps."""
    for host in gang.hosts:
        counts = re.findall(r"^compilations: (\d+)$", host.output, re.MULTILINE)
        assert counts == [counts[0]] * (steps // EVERY - 1)
