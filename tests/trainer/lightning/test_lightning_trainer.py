"""Lightning's own Trainer: what only it can train, and that a run under it is a run like any other."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion
from torch import nn
from torch.utils.data import TensorDataset

from tests.trainer import fork_server, in_process, lightning_zoo
from tests.trainer.gang_processes import Launcher, run_spec
from tpu_contract.protocol import ExitCode
from tpu_contract.run_spec import parse_run_spec
from tpu_trainer.checkpoint.snapshot import put_together, take_apart
from tpu_trainer.checks.entry.first_steps import run_first_steps
from tpu_trainer.contract.environment import WorkerEnvironment
from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.contract.stop import SharedStop
from tpu_trainer.data.order import Order, Share, StreamData
from tpu_trainer.lightning_trainer.loaders import ProcessStream, shares
from tpu_trainer.lightning_trainer.package import package_of, refuse_mixed
from tpu_trainer.lightning_trainer.state import mark, unmark

# Lightning warns of what a user should think of, such as a step that returned nothing.
pytestmark = pytest.mark.filterwarnings("ignore")


def spec(name: str, **changes: Any) -> dict[str, Any]:
    """Ten steps of 16 examples, which are two and a half epochs, in the loop that can train the module."""
    return run_spec(
        **{
            "entrypoint": f"tests.trainer.lightning_zoo:{name}",
            "loop": "Lightning" if name in lightning_zoo.ONLY_UNDER_LIGHTNING else "BuiltIn",
            "hosts": 1,
            "replicas": 1,
            "trainSteps": 10,
            "warmupSteps": 2,
            **changes,
        }
    )


def run(name: str, directory: Path, **changes: Any) -> in_process.Run:
    return in_process.run(spec(name, **changes), directory)


VAL_LOSS = {"metric": "val_loss", "mode": "Min"}

BOTH = ("Plain", "Clipping", "WithTestStep", "LocalRank", "Logger", "Auroc")

NEEDS = {
    "Gan": "Gan.automatic_optimization = False",
    "Callbacks": "Callbacks.configure_callbacks()",
    "OwnStep": "OwnStep.optimizer_step()",
    "LogDirectory": "AttributeError: the logger of tpu_trainer has no log_dir",
    "Plateau": "ReduceLROnPlateau without recipe.evaluateEverySteps",
    "TwoValidations": "validation_step takes (batch, batch_idx, dataloader_idx)",
    "Gathers": "AttributeError: trainer.strategy: the trainer's own loop does not support this",
    "ShouldStop": "AttributeError: setting trainer.should_stop: the trainer's own loop does not",
    "Highest": 'self.log("val_loss", reduce_fx=max)',
    "Weighted": "train_dataloader() with a WeightedRandomSampler",
    "OwnBatches": "train_dataloader() with a Buckets as batch_sampler",
    "NoBatchSize": "train_dataloader() with batch_size=None",
    "Streams": "val_dataloader() over an iterable dataset",
    "DictOfLoaders": "train_dataloader() returns a dict",
}
"""What is said of each module in the trainer's own loop."""

THE_LINE = "spec.trainer.loop: Lightning"


@pytest.mark.parametrize(("name", "loop"), [*product(BOTH, ("BuiltIn", "Lightning")), ("StrategyIfAny", "BuiltIn")])
def test_a_plain_module_trains_in_both_loops(name: str, loop: str, tmp_path: Path) -> None:
    done = run(name, tmp_path, loop=loop)
    assert done.outcome.code is ExitCode.Succeeded, done.outcome.message
    assert done.losses[-1] < done.losses[0]


@pytest.mark.parametrize("name", [*NEEDS, "Skips", "Lbfgs", "WithoutOptimizer"])
def test_a_module_that_needs_lightnings_trainer_names_the_line_and_trains_with_it(name: str, tmp_path: Path) -> None:
    refused = run(name, tmp_path, loop="BuiltIn").outcome
    assert refused.code is ExitCode.UserError
    assert THE_LINE in refused.message
    assert NEEDS.get(name, "") in refused.message
    done = run(name, tmp_path, loop="Lightning")
    assert done.outcome.code is ExitCode.Succeeded, done.outcome.message
    assert done.losses[-1] < done.losses[0]


def test_a_task_has_no_lightning_trainer(tmp_path: Path) -> None:
    outcome = in_process.run(run_spec(replicas=1, trainSteps=2, loop="Lightning"), tmp_path).outcome
    assert outcome.code is ExitCode.UserError
    assert "returned a Task; trainer.loop: Lightning" in outcome.message


@pytest.mark.parametrize(
    ("name", "changes", "code", "said"),
    [
        ("Gan", {}, ExitCode.UserError, THE_LINE),
        ("Gathers", {}, ExitCode.UserError, THE_LINE),
        ("Gan", {"loop": "Lightning"}, ExitCode.Succeeded, "steps under Lightning's own Trainer are not tried"),
        ("asked", {}, ExitCode.Succeeded, "steps under Lightning's own Trainer are not tried"),
        ("Gan", {"loop": "Lightning", "emaDecay": "0.9"}, ExitCode.UserError, "recipe.emaDecay: not with"),
        ("decided", {}, ExitCode.UserError, "from recipe.trainSteps"),
        ("Auroc", {}, ExitCode.Succeeded, "made 2 steps"),
    ],
)
def test_the_entry_check_says_so_before_the_job_has_a_slice(
    name: str, changes: dict[str, Any], code: ExitCode, said: str, tmp_path: Path
) -> None:
    document = spec(name, replicas=4, batch={"global": 16, "perReplica": 4}, **{"loop": "BuiltIn", **changes})
    environment = WorkerEnvironment(tmp_path / "run.json", 0, 1, "", 0)
    outcome = run_first_steps(parse_run_spec(document), environment, SharedStop(tmp_path / "stop"), pytest.fail)
    assert outcome.code is code, outcome.message
    assert said in outcome.message


@pytest.mark.parametrize("passes", [1, 4])
def test_a_plain_module_has_the_same_losses_and_metrics_under_both(passes: int, tmp_path: Path) -> None:
    batch = {"global": 16, "perReplica": 16 // passes, "accumulation": passes}
    own, lightnings = (run(name, tmp_path, batch=batch) for name in ("Plain", "asked"))
    assert lightnings.losses == pytest.approx(own.losses, rel=1e-6)
    assert lightnings.outcome.metrics == pytest.approx(own.outcome.metrics, rel=1e-6)


def test_a_step_that_evaluates_its_loss_again_reports_the_one_that_it_began_with(tmp_path: Path) -> None:
    assert run("Lbfgs", tmp_path).losses[0] == pytest.approx(run("asked", tmp_path).losses[0])


def test_lightnings_trainer_clips_by_the_recipes_norm(tmp_path: Path) -> None:
    assert run("asked", tmp_path, gradientClipNorm="0.001").losses[-1] > 5 * run("asked", tmp_path).losses[-1]


def test_options_of_the_trainer_come_from_the_entrypoint(tmp_path: Path) -> None:
    assert run("clipped", tmp_path).losses[-1] > 5 * run("asked", tmp_path).losses[-1]


def test_evaluations_that_the_module_has_no_step_for_are_a_warning(tmp_path: Path) -> None:
    said = "evaluateEverySteps 2 is not used: the module has nothing to validate"
    assert said in run("Unfreezes", tmp_path, evaluateEverySteps=2).warnings
    assert said not in run("Callbacks", tmp_path, evaluateEverySteps=2).warnings


def test_a_callback_ends_the_training_early(tmp_path: Path) -> None:
    done = run("StopsEarly", tmp_path)
    assert done.outcome.step == 4
    assert done.outcome.message.startswith("trained 4 steps of 10, ended")


def test_files_of_callbacks_and_loggers_lie_beside_the_checkpoints_and_the_report(tmp_path: Path) -> None:
    run("Callbacks", tmp_path, checkpoint={"uri": str(tmp_path / "kept"), "keep": 1}, report={"uri": str(tmp_path)})
    assert list((tmp_path / "kept" / "lightning").rglob("best.ckpt"))
    assert list((tmp_path / "lightning").rglob("events.out.tfevents*"))


@pytest.mark.parametrize(
    "name", ["Accumulates", "Follows", "Gan", "Grows", "Plateau", "StepPlateau", "Unfreezes", "Weighted"]
)
@pytest.mark.parametrize("step", [2, 4])
def test_a_run_continues_as_if_it_had_not_stopped_inside_an_epoch_and_at_its_end(
    name: str, step: int, tmp_path: Path
) -> None:
    kept, only = tmp_path / "kept", tmp_path / "only"
    whole = run(name, tmp_path, checkpoint={"uri": str(kept), "everySteps": 1, "keep": 50})
    (folder,) = kept.glob(f"step-{step:08}-*")
    shutil.copytree(folder, only / folder.name)
    job = {"namespace": "default", "name": "small", "uid": "5f0c", "attempt": 2}
    again = run(name, tmp_path, job=job, checkpoint={"uri": str(only), "keep": 1})
    assert again.outcome.code is ExitCode.Succeeded, again.outcome.message
    assert again.losses == whole.losses[step:]
    assert again.outcome.metrics == whole.outcome.metrics


@pytest.mark.parametrize("loop", ["BuiltIn", "Lightning"])
def test_a_rate_that_a_hook_sets_after_an_evaluation_is_in_the_checkpoint_of_its_step(
    loop: str, tmp_path: Path
) -> None:
    kept, only = tmp_path / "kept", tmp_path / "only"
    changes = {"loop": loop, "evaluateEverySteps": 2}
    whole = run("HalvesRate", tmp_path, checkpoint={"uri": str(kept), "everySteps": 4, "keep": 9}, **changes)
    (folder,) = kept.glob("step-00000004-*")
    shutil.copytree(folder, only / folder.name)
    job = {"namespace": "default", "name": "small", "uid": "5f0c", "attempt": 2}
    again = run("HalvesRate", tmp_path, job=job, checkpoint={"uri": str(only), "keep": 1}, **changes)
    assert again.losses == whole.losses[4:]


@pytest.mark.parametrize(("stop", "changes"), [(3, {}), (4, {}), (8, {}), (6, {"evaluateEverySteps": 3})])
def test_a_run_that_is_stopped_continues_with_what_its_epoch_still_lacks(
    stop: int, changes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four steps are an epoch."""
    kept, told = {"uri": str(tmp_path / "kept"), "keep": 1}, tmp_path / "stop"
    monkeypatch.setenv("TEST_STOP_FILE", str(told))
    monkeypatch.setenv("TEST_STOP", "99")
    whole = run("Told", tmp_path, **changes)
    monkeypatch.setenv("TEST_STOP", str(stop - 1))
    stopped = run("Told", tmp_path, checkpoint=kept, **changes)
    assert (stopped.outcome.code, len(stopped.losses)) == (ExitCode.Preempted, stop)
    told.unlink()
    monkeypatch.setenv("TEST_STOP", "99")
    job = {"namespace": "default", "name": "small", "uid": "5f0c", "attempt": 2}
    again = run("Told", tmp_path, job=job, checkpoint=kept, **changes)
    assert again.outcome.code is ExitCode.Succeeded, again.outcome.message
    assert stopped.losses + again.losses == whole.losses
    assert again.outcome.metrics == whole.outcome.metrics


def test_a_run_that_prunes_continues_and_says_that_it_prunes_otherwise(tmp_path: Path) -> None:
    whole, only = tmp_path / "whole", tmp_path / "only"
    first = run("Pruned", tmp_path, checkpoint={"uri": str(whole), "everySteps": 2, "keep": 9})
    (folder,) = whole.glob("step-00000006-*")
    shutil.copytree(folder, only / folder.name)
    job = {"namespace": "default", "name": "small", "uid": "5f0c", "attempt": 2}
    again = run("Pruned", tmp_path, job=job, checkpoint={"uri": str(only), "keep": 1})
    assert (again.outcome.code, len(again.losses)) == (ExitCode.Succeeded, 4), again.outcome.message
    said = "callback ModelPruning: a checkpoint keeps the weights but not which of them are pruned"
    assert all(any(text.startswith(said) for text in one.warnings) for one in (first, again))


def test_a_progress_bar_is_left_out(tmp_path: Path) -> None:
    assert run("bars", tmp_path).outcome.code is ExitCode.Succeeded


def test_a_run_with_another_batch_begins_its_epoch_again_and_trains_what_is_left(tmp_path: Path) -> None:
    kept = {"uri": str(tmp_path / "kept"), "keep": 1}
    run("asked", tmp_path, trainSteps=6, checkpoint=kept)
    job = {"namespace": "default", "name": "small", "uid": "5f0c", "attempt": 2}
    again = run("asked", tmp_path, job=job, batch={"global": 32, "perReplica": 32}, trainSteps=5, checkpoint=kept)
    assert again.outcome.code is ExitCode.Succeeded, again.outcome.message
    assert len(again.losses) == 2


def test_a_module_whose_layers_come_with_its_setup_continues(tmp_path: Path) -> None:
    kept = {"uri": str(tmp_path / "kept"), "keep": 1}
    first = run("LayerOfSetup", tmp_path, trainSteps=6, checkpoint=kept)
    assert first.outcome.code is ExitCode.Succeeded, first.outcome.message
    job = {"namespace": "default", "name": "small", "uid": "5f0c", "attempt": 2}
    again = run("LayerOfSetup", tmp_path, job=job, checkpoint=kept)
    assert again.outcome.code is ExitCode.Succeeded, again.outcome.message
    assert len(again.losses) == 4
    assert not [text for text in again.warnings if text.startswith("begins at step 0")]


def test_data_that_has_grown_between_two_attempts_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"uri": str(tmp_path / "kept"), "keep": 1}
    run("asked", tmp_path, trainSteps=6, checkpoint=kept)
    grown = [torch.cat([values, values[:16]]) for values in lightning_zoo.DATA.tensors]
    monkeypatch.setattr(lightning_zoo, "DATA", TensorDataset(*grown))
    job = {"namespace": "default", "name": "small", "uid": "5f0c", "attempt": 2}
    again = run("asked", tmp_path, job=job, checkpoint=kept)
    assert (again.outcome.code, again.outcome.step) == (ExitCode.Succeeded, 10), again.outcome.message
    assert any("has 80 examples, and had 64 " in w for w in again.warnings)


def test_a_checkpoint_of_the_own_loop_is_not_continued(tmp_path: Path) -> None:
    kept = {"uri": str(tmp_path / "kept"), "keep": 1}
    run("Plain", tmp_path, checkpoint=kept)
    (tmp_path / "other").mkdir()
    elsewhere = {"uri": str(tmp_path / "other"), "keep": 1, "resumeFrom": kept["uri"]}
    refused = run("Callbacks", tmp_path, trainSteps=20, checkpoint=elsewhere).outcome
    assert refused.code is ExitCode.UserError


def test_a_checkpoint_of_lightnings_trainer_names_the_line_that_continues_it(tmp_path: Path) -> None:
    kept = {"uri": str(tmp_path / "kept"), "keep": 1}
    run("Plain", tmp_path, trainSteps=6, loop="Lightning", checkpoint=kept)
    job = {"namespace": "default", "name": "small", "uid": "5f0c", "attempt": 2}
    refused = run("Plain", tmp_path, job=job, checkpoint=kept).outcome
    assert refused.code is ExitCode.UserError
    assert THE_LINE in refused.message
    again = run("Plain", tmp_path, job=job, loop="Lightning", checkpoint=kept)
    assert (again.outcome.code, len(again.losses)) == (ExitCode.Succeeded, 4), again.outcome.message


def test_a_gang_trains_what_one_process_trains_through_a_stop_of_one_host(launcher: Launcher, tmp_path: Path) -> None:
    alone = run("Essentials", tmp_path)
    assert alone.outcome.code is ExitCode.Succeeded, alone.outcome.message
    losses: list[float] = []
    for attempt, stop in ((1, "5"), (2, "0")):
        job = {"namespace": "default", "name": "small", "uid": "5f0c", "attempt": attempt}
        checkpoint = {"uri": str(tmp_path / "kept"), "keep": 1}
        document = spec("Essentials", hosts=2, replicas=2, job=job, checkpoint=checkpoint)
        gang = launcher.start(document, packages=fork_server.FRAMEWORKS, TEST_STOP=stop)
        expected = ExitCode.Preempted if attempt == 1 else ExitCode.Succeeded
        # Replicas with different weights would have ended as Diverged.
        assert gang.wait() == [expected] * 2, gang.output()
        losses += gang.losses()
    assert len(losses) == 10
    assert losses == pytest.approx(alone.losses, rel=1e-4)
    assert all(host.message()["metrics"] == pytest.approx(alone.outcome.metrics, rel=1e-4) for host in gang.hosts)


@pytest.mark.parametrize("hosts", [1, 2])
def test_what_a_callback_averages_is_validated_as_it_is_saved(hosts: int, launcher: Launcher, tmp_path: Path) -> None:
    checkpoint = {"uri": str(tmp_path / "kept"), "keep": 1}
    document = spec("Averages", hosts=hosts, replicas=hosts, backend="xla", evaluateEverySteps=5, checkpoint=checkpoint)
    gang = launcher.start(document, packages=fork_server.FRAMEWORKS)
    assert gang.wait() == [ExitCode.Succeeded] * hosts, gang.output()
    module = lightning_zoo.Averages(0.1)
    (file,) = (tmp_path / "kept").glob("step-00000010-*/model.safetensors")
    safetensors.torch.load_model(module, str(file))
    features, target = zip(*lightning_zoo.HELD_OUT, strict=True)
    with torch.no_grad():
        expected = module.eval().loss((torch.stack(features), torch.stack(target))).item()
    evaluated = [made for made in gang.recorded().evaluations if made["step"] == 10]
    # Before and after the hooks of the end.
    assert [made["val_loss"] for made in evaluated] == pytest.approx([expected] * 2, rel=1e-5)
    # The step after an evaluation is no other program.
    assert not [text for texts in gang.warnings().values() for text in texts if "compiled a new program" in text]


@pytest.mark.parametrize("name", ["Collects", "CollectsAndGathers"])
def test_a_number_of_one_processs_outputs_is_a_warning_once(name: str, launcher: Launcher) -> None:
    gang = launcher.start(
        spec(name, hosts=2, replicas=2, evaluateEverySteps=3, trainSteps=6), packages=fork_server.FRAMEWORKS
    )
    assert gang.wait() == [ExitCode.Succeeded] * 2, gang.output()
    warnings = (text for texts in gang.warnings().values() for text in texts)
    (said,) = (text for text in warnings if text.startswith("on_validation_epoch_end logs"))
    # What is gathered is the same in all.
    assert "held-out data: highest. " in said


def test_an_exception_of_the_module_ends_with_its_own_line(tmp_path: Path) -> None:
    outcome = run("Raises", tmp_path).outcome
    assert outcome.code is ExitCode.UserError
    assert outcome.message.endswith("ZeroDivisionError: mine")


def test_a_loss_that_is_not_finite_ends_the_run_before_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = {"uri": str(tmp_path / "kept"), "everySteps": 1, "keep": 50}
    outcome = run("NotANumber", tmp_path, checkpoint=checkpoint).outcome
    assert outcome.code is ExitCode.NotFinite
    assert outcome.step == 6
    assert len(list((tmp_path / "kept").glob("step-*"))) == 5


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("Gan", {"onNotFinite": "Skip"}, "recipe.onNotFinite: Skip:"),
        ("Gan", {"emaDecay": "0.9"}, "recipe.emaDecay: not with"),
        ("Gan", {"stopEarly": {**VAL_LOSS, "patience": 1}}, "recipe.stopEarly: not with"),
        ("Gan", {"schedule": {"name": "Plateau", **VAL_LOSS, "patience": 1}}, "recipe.schedule Plateau:"),
        ("Gan", {"precision": "BFloat16"}, "recipe.precision: BFloat16:"),
        ("Gan", {"gradientClipNorm": "1"}, "recipe.gradientClipNorm: not with"),
        ("decided", {}, "from recipe.trainSteps"),
        ("limited", {"parameters": {"batches": "1", "whole": "true"}}, "limit_val_batches: not with"),
        ("limited", {"parameters": {"batches": "0.5", "whole": "false"}}, "limit_val_batches: not with"),
        ("unknown", {}, "unexpected keyword argument"),
        ("LeavesEpoch", {"loop": "Lightning"}, "on_train_batch_start returns -1"),
        ("LeavesEpoch", {"loop": "BuiltIn"}, "on_train_batch_start returns -1"),
        ("ValidatesLoss", {"loop": "Lightning"}, 'the name "loss" is the training loss'),
        ("StepsByItself", {}, "must come from self.manual_backward"),
        ("AsksForGradients", {}, "must come from self.manual_backward"),
    ],
)
def test_what_lightnings_trainer_cannot_do_here_is_refused(
    name: str, changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    outcome = run(name, tmp_path, **changes).outcome
    assert outcome.code is ExitCode.UserError
    assert complaint in outcome.message


@pytest.mark.parametrize("batches", ["0", "1"])
def test_validation_may_be_left_out_or_whole(batches: str, tmp_path: Path) -> None:
    outcome = run("limited", tmp_path, parameters={"batches": batches, "whole": "false"}).outcome
    assert outcome.code is ExitCode.Succeeded
    assert ("val_loss" in outcome.metrics) == (batches == "1")


@pytest.mark.parametrize("callback", lightning_zoo.REFUSED)
def test_a_callback_that_contradicts_the_recipe_is_refused_before_the_first_step(callback: str, tmp_path: Path) -> None:
    outcome = run("refused", tmp_path, parameters={"callback": callback}).outcome
    assert outcome.code is ExitCode.UserError
    assert not outcome.step
    assert f"callback {callback}: " in outcome.message


def test_so_is_one_that_the_module_brings_and_a_change_of_the_passes(tmp_path: Path) -> None:
    assert "callback MyFinder: " in run("Brings", tmp_path).outcome.message
    assert "batches was set to 2" in run("ChangesPasses", tmp_path).outcome.message


def test_a_state_that_was_loaded_in_mid_run_leaves_the_rates_to_the_recipe(tmp_path: Path) -> None:
    done = run("tries_rates", tmp_path)
    assert done.outcome.code is ExitCode.Succeeded, done.outcome.message
    assert done.losses[-1] < 0.1


def test_what_cannot_be_kept_is_known_before_the_first_step(tmp_path: Path) -> None:
    kept = {"uri": str(tmp_path / "kept"), "keep": 1}
    outcome = run("keeps_a_function", tmp_path, parameters={"since": "0"}, checkpoint=kept).outcome
    assert outcome.code is ExitCode.UserError
    assert not outcome.step
    assert "/callbacks/_KeepsAFunction/" in outcome.message
    assert "builtin_function_or_method)" in outcome.message


def test_what_cannot_be_kept_later_costs_a_warning_and_no_checkpoint(tmp_path: Path) -> None:
    kept = {"uri": str(tmp_path / "kept"), "everySteps": 2, "keep": 1}
    first = run("keeps_a_function", tmp_path, parameters={"since": "3"}, checkpoint=kept)
    assert first.outcome.code is ExitCode.Succeeded, first.outcome.message
    said = [text for text in first.warnings if "cannot keep /callbacks/_KeepsAFunction/annealing/function" in text]
    assert len(said) == 1
    job = {"namespace": "default", "name": "small", "uid": "5f0c", "attempt": 2}
    again = run("keeps_a_function", tmp_path, parameters={"since": "3"}, trainSteps=14, job=job, checkpoint=kept)
    assert (again.outcome.code, again.outcome.step) == (ExitCode.Succeeded, 14), again.outcome.message


def test_a_module_that_is_none_of_lightnings_cannot_have_its_trainer(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(UserCodeError) as caught:
        package_of(nn.Linear(1, 1))
    assert str(caught.value) == snapshot


def test_parts_of_lightnings_two_packages_are_told_apart(snapshot: SnapshotAssertion) -> None:
    early = type("EarlyStopping", (), {"__module__": "lightning.pytorch.callbacks.early_stopping"})
    own = type("Patient", (early,), {"__module__": "project.callbacks"})
    module = lightning_zoo.Plain(0.1)
    refuse_mixed(module, [None, True, module, nn.Linear(1, 1)])
    with pytest.raises(UserCodeError) as caught:
        refuse_mixed(module, [None, own()])
    assert str(caught.value) == snapshot


def test_a_step_that_returns_none_ends_a_run_of_several_processes(launcher: Launcher) -> None:
    gang = launcher.start(spec("Skips", hosts=2, replicas=2), packages=fork_server.FRAMEWORKS)
    assert ExitCode.UserError in gang.wait()
    assert "training_step returns None; return the loss in every step" in gang.output()


@given(st.integers(0, 200), st.integers(1, 9), st.integers(1, 20), st.booleans())
def test_each_held_out_example_is_in_one_of_equally_many_batches(size: int, world: int, rows: int, ready: bool) -> None:
    def divide(rank: int) -> list[range]:
        return shares(size, Share(rank, world), 1 if ready else rows, ready=ready)

    if size % world if ready else 0 < size < world:
        with pytest.raises(UserCodeError, match=f"val_dataloader: its {size} "):
            divide(0)
        return
    parts = [divide(rank) for rank in range(world)]
    assert len({len(part) for part in parts}) == 1
    most = 1 if ready else max(rows, 2)
    assert all(1 <= len(batch) <= most for part in parts for batch in part)
    assert [at for part in parts for batch in part for at in batch] == list(range(size))


@pytest.mark.parametrize("size", [8, 9, 16, 17, 23])
def test_each_held_out_example_of_a_stream_is_in_one_of_equally_many_batches(size: int) -> None:
    order = Order(8, 0, Share(0, 2))
    dataset = [*range(size)]
    streams = [
        ProcessStream(StreamData(replace(order, share=Share(rank, 2)), dataset), training=False, ready=False)
        for rank in range(2)
    ]
    parts = [list(stream) for stream in streams]
    assert len(parts[0]) == len(parts[1])
    assert sorted(at for part in parts for batch in part for at in batch) == dataset


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
NESTED = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.integers() | st.text(), inner),
    max_leaves=5,
)


@given(NESTED)
def test_lightnings_state_comes_back_as_it_was(value: Any) -> None:
    tree, tensors = take_apart(mark(value), "it")
    assert unmark(put_together(tree, tensors)) == value


def test_tensors_and_numbers_of_numpy_are_part_of_the_state() -> None:
    weights = torch.arange(3.0)
    tree, tensors = take_apart(mark({0: (weights, torch.ones(1).numpy()[0])}), "it")
    back = unmark(put_together(tree, tensors))
    assert back[0][0] is weights
    assert back[0][1] == 1.0
