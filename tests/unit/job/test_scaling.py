"""The recipe on another slice: the numbers of the published examples, and what holds for every recipe."""

import re
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from tests.unit.jobs import ABSENT, spec
from tpu_training_operator.api.recipe import Recipe
from tpu_training_operator.api.validation import InvalidJob
from tpu_training_operator.domain.job.recipe.noise_scale import best_multiplier, examples_multiplier
from tpu_training_operator.domain.job.recipe.resolve import resolve
from tpu_training_operator.domain.job.recipe.scale import ScaledRecipe, scale


def recipe(**changes: Any) -> Recipe:
    names = {"batch": "globalBatchSize", "steps": "trainSteps", "warmup": "warmupSteps", "dataset": "datasetSize"}
    if "epochs" in changes:
        changes["steps"] = ABSENT
    return spec({f"recipe.{names.get(name, name)}": value for name, value in changes.items()}).recipe


# Goyal et al. 2017: five epochs of warm-up, which are 4.5 where 5 % of the training are added.
IMAGENET = {"epochs": 90, "dataset": 1_281_167}
DIGITS = {"batch": 32, "steps": 1212, "warmup": 81}
SGD, ADAMW = {"name": "sgd", "learningRate": "0.1"}, {"name": "adamw", "learningRate": "3e-4"}
SOPHIA = {"name": "sophia", "learningRate": "0.1"}


@pytest.mark.parametrize(
    ("tuned", "replicas", "before", "batch", "steps"),
    [
        # Google's example: v2-8 to v2-32.
        (8, 32, {"batch": 1024, "steps": 1000}, 4096, 250),
        (8, 32, {"batch": 1000, "steps": 100}, 4000, 25),
        # 101 x 1000 examples are 25.25 steps of 4000: one more step rather than fewer examples.
        (8, 32, {"batch": 1000, "steps": 101}, 4000, 26),
        (32, 8, {"batch": 4096, "steps": 250}, 1024, 1000),
        (8, 8, {"batch": 1024, "steps": 1000}, 1024, 1000),
        (8, 12, {"batch": 1024, "steps": 1000}, 1536, 667),
        (1, 2048, {"batch": 1, "steps": 1}, 2048, 1),
        # ImageNet: epochs stay, the steps of an epoch are whole batches.
        (8, 256, {"batch": 256, "epochs": 90, "dataset": 1_281_167}, 8192, 90 * 156),
        (8, 8, {"batch": 256, "epochs": 90, "dataset": 1_281_167}, 256, 90 * 5004),
    ],
)
def test_every_replica_keeps_its_batch_and_the_training_sees_the_same_examples(
    tuned: int, replicas: int, before: dict[str, int], batch: int, steps: int
) -> None:
    scaled = scale(recipe(**before), tuned, replicas)
    assert (scaled.batch.total, scaled.train_steps) == (batch, steps)
    assert scaled.batch.per_replica == before["batch"] // tuned


@pytest.mark.parametrize(
    ("tuned", "replicas", "before", "rate"),
    [
        (8, 32, {"batch": 256, "optimizer": SGD}, "0.4"),
        # Beyond four times the batch the rate stays.
        (8, 256, {"batch": 256, "optimizer": SGD}, "0.4"),
        (8, 256, {"batch": 256, "optimizer": SGD} | IMAGENET, "3.2"),
        (8, 512, {"batch": 256, "optimizer": SGD} | IMAGENET, "0.4"),
        (8, 256, {"batch": 256, "optimizer": SGD} | IMAGENET | {"epochs": 5}, "0.4"),
        (8, 4, {"batch": 256, "optimizer": SGD}, "0.05"),
        (8, 32, {"batch": 256, "optimizer": ADAMW}, "0.0006"),
        (8, 32, {"batch": 256, "optimizer": {"name": "AdamW", "learningRate": "0.0003"}}, "0.0006"),
        (8, 512, {"batch": 256, "optimizer": {"name": "LAMB", "learningRate": "0.0003"}}, "0.0024"),
        (8, 32, {"batch": 256, "optimizer": {"name": "sophia", "learningRate": "0.1"}}, "0.1"),
        (8, 32, {"batch": 256, "optimizer": SGD, "scaling": {"learningRate": "SquareRoot"}}, "0.2"),
        (8, 256, {"batch": 256, "optimizer": SGD, "scaling": {"learningRate": "Linear"}}, "3.2"),
        (8, 32, {"batch": 256, "optimizer": ADAMW, "scaling": {"learningRate": "Linear"}}, "0.0012"),
        (8, 32, {"batch": 256, "optimizer": SGD, "scaling": {"learningRate": "Unscaled"}}, "0.1"),
        (8, 256, {"batch": 256, "optimizer": SGD, "scaling": {"maxLearningRate": "0.3"}}, "0.3"),
        # Digits: 32 to 512 examples, noise scale 420; there and back.
        (1, 16, {"batch": 32, "optimizer": SGD, "gradientNoiseScale": "420"}, "0.776"),
        (1, 16, {"batch": 32, "optimizer": ADAMW, "gradientNoiseScale": "420"}, "0.000837"),
        (16, 1, {"batch": 512, "optimizer": SGD, "gradientNoiseScale": "420"}, "0.0129"),
        # An explicit rule is what the user wants.
        (
            1,
            16,
            {"batch": 32, "optimizer": SGD, "gradientNoiseScale": "420", "scaling": {"learningRate": "Linear"}},
            "1.6",
        ),
        (8, 8, {"batch": 256, "optimizer": SGD, "scaling": {"maxLearningRate": "1.6"}}, "0.1"),
        # Unscaled it is the user's own number, to the last digit.
        (8, 8, {"batch": 256, "optimizer": {"name": "sgd", "learningRate": "0.0031622776601683794"}}, None),
    ],
)
def test_the_learning_rate_follows_the_rule_of_its_optimizer(
    tuned: int, replicas: int, before: dict[str, Any], rate: str | None
) -> None:
    scaled = scale(recipe(**before), tuned, replicas)
    assert scaled.learning_rate == (rate or before["optimizer"]["learningRate"])


@pytest.mark.parametrize(
    ("tuned", "replicas", "before", "warmup"),
    [
        # Goyal et al. warm up over five epochs: 25 000 steps of 256, 782 steps of 8192.
        (8, 256, {"batch": 256, "steps": 450_000, "warmup": 25_000}, 782),
        (8, 32, {"batch": 1024, "steps": 1000, "warmup": 100}, 25),
        (8, 32, {"batch": 1024, "steps": 1000, "warmup": 1}, 1),
        (8, 32, {"batch": 1024, "steps": 1000, "warmup": 0}, 0),
        (32, 8, {"batch": 1024, "steps": 1000, "warmup": 10}, 40),
        # None given: a larger batch gets a twentieth of the training, or five epochs if they are less; a smaller none.
        (8, 32, {"batch": 1024, "steps": 1000}, 13),
        (8, 32, {"batch": 1024, "epochs": 1000, "dataset": 8192}, 10),
        (32, 8, {"batch": 1024, "steps": 1000}, 0),
        (8, 32, {"batch": 1024, "steps": 1000, "scaling": {"batch": "GlobalConstant"}}, 0),
    ],
)
def test_warm_up_keeps_its_number_of_examples(tuned: int, replicas: int, before: dict[str, Any], warmup: int) -> None:
    assert scale(recipe(**before), tuned, replicas).warmup_steps == warmup


ADAPTIVE = {"optimizer": SGD, "scaling": {"learningRate": "AdaScale"}}


@pytest.mark.parametrize(
    ("replicas", "before", "steps"),
    [
        (16, {"batch": 32, "steps": 1212}, (76, 1212)),
        (32, {"batch": 32, "steps": 1212}, (38, 1212)),
        (12, {"batch": 32, "steps": 101}, (9, 101)),
        (1, {"batch": 32, "steps": 1212}, (1212, 1212)),
        # Epochs are the recipe's, whose steps drop the last 10 of 202 examples.
        (4, {"batch": 32, "epochs": 5, "dataset": 202}, (8, 30)),
        (
            16,
            {"batch": 32, "steps": 1212, "scaling": {"batch": "GlobalConstant", "learningRate": "AdaScale"}},
            (1212,) * 2,
        ),
    ],
)
def test_adascale_keeps_rate_warm_up_and_steps_of_the_recipe_and_ends_with_the_sum_of_its_gains(
    replicas: int, before: dict[str, Any], steps: tuple[int, int]
) -> None:
    schedule = {"name": "Step", "milestones": [100, 200]}
    scaled = scale(recipe(**{**ADAPTIVE, "warmup": 81, "schedule": schedule, **before}), 1, replicas)
    assert (scaled.fewest_steps, scaled.train_steps) == steps
    assert (scaled.learning_rate, scaled.warmup_steps, scaled.milestones) == ("0.1", 81, (100, 200))


def test_adascale_adds_no_warm_up_and_scales_evaluations_by_the_batch() -> None:
    scaled = scale(recipe(**ADAPTIVE, batch=32, evaluateEverySteps=160), 1, 16)
    assert (scaled.warmup_steps, scaled.evaluate_every_steps) == (0, 10)


LONG = {"steps": 100_000}


@pytest.mark.parametrize(
    ("replicas", "before", "warning"),
    [
        (8, {"optimizer": SGD}, None),
        (32, {"optimizer": SGD, "steps": 3996}, "the training makes 999 updates, fewer than 1000"),
        (32, {"optimizer": SGD, "steps": 4000}, None),
        # Examples that are seen 15 times have been learned from, so that 100 updates are enough.
        (16, {"epochs": 14, "dataset": 256 * 70}, "the training makes 980 updates in 14 passes over the data, fewer"),
        (16, {"epochs": 14, "dataset": 256 * 72}, None),
        (16, {"epochs": 15, "dataset": 256 * 7}, None),
        (16, {"epochs": 15, "dataset": 256 * 6}, "the training makes 90 updates in 15 passes over the data, fewer"),
        (16, {"steps": 1800, "dataset": 256 * 60}, None),
        (16, {"steps": 1800, "dataset": 256 * 70}, "the training makes 900 updates in 13 passes"),
        (16, ADAPTIVE | {"epochs": 15, "dataset": 256 * 2}, None),
        (8, {"optimizer": SGD, "steps": 10}, None),
        (32, {"optimizer": SGD} | LONG, None),
        (64, {"optimizer": SGD} | LONG, None),
        (72, {"optimizer": SGD} | LONG, "the global batch of 1152 is 9 times the tuned one, its learning rate 4 times"),
        (72, {"optimizer": SGD, "gradientNoiseScale": "1e6"} | LONG, None),
        (40, {"optimizer": SGD, "scaling": {"learningRate": "SquareRoot"}} | LONG, None),
        (32, {"optimizer": SGD, "scaling": {"learningRate": "Linear"}} | LONG, None),
        (40, {"optimizer": SGD, "scaling": {"learningRate": "Linear"}} | LONG, "the global batch of 640 is 5 times"),
        (72, {"optimizer": SGD, "scaling": {"maxLearningRate": "0.3"}} | LONG, None),
        (72, {"optimizer": SGD, "scaling": {"learningRate": "Linear"}} | LONG, "the global batch of 1152 is 9 times"),
        (72, {"optimizer": SGD, "scaling": {"learningRate": "Unscaled"}} | LONG, None),
        (128, {"optimizer": ADAMW} | LONG, None),
        (136, {"optimizer": ADAMW} | LONG, "the global batch of 2176 is 17 times the tuned one"),
        (136, {"optimizer": ADAMW, "gradientNoiseScale": "1e6"} | LONG, None),
        (8, {"optimizer": SOPHIA}, None),
        (16, {"optimizer": SOPHIA} | LONG, "the learning rate is not scaled"),
        (8, {"epochs": 1, "dataset": 128 * 100 + 127}, None),
        (8, {"epochs": 1, "dataset": 128 * 10 + 127}, "every epoch drops its last, incomplete batch: 127"),
        (32, {"epochs": 800, "dataset": 2048}, None),
        (32, {"epochs": 800, "dataset": 1536}, "the global batch of 512 is 33% of the 1536 examples"),
        (8, {"gradientNoiseScale": "128"}, None),
        (8, {"gradientNoiseScale": "1"}, None),
        (16, {"gradientNoiseScale": "4096"} | LONG, None),
        (16, {"gradientNoiseScale": "128"} | LONG, "with the gradient noise scale of 128, a global batch of 256 needs"),
        # 1.5 times the examples: 23 passes over the data can spare them, 22 cannot, and no training spares half.
        (16, {"gradientNoiseScale": "128", "epochs": 23, "dataset": 256 * 99}, None),
        (16, {"gradientNoiseScale": "128", "epochs": 22, "dataset": 256 * 99}, "with the gradient noise scale of 128"),
        (32, {"gradientNoiseScale": "127", "epochs": 90, "dataset": 512 * 99}, "with the gradient noise scale of 127"),
        (4, {"gradientNoiseScale": "128"}, None),
        (16, {"scaling": {"batch": "GlobalConstant"}}, None),
        (32, {"scaling": {"batch": "GlobalConstant"}}, "the per-replica batch of 4 is not a multiple of 8"),
        (8, {"steps": 10, "warmup": 11}, "warm-up takes 11 steps, but the training ends after 10"),
        (16, {"warmup": 2} | LONG, "the learning rate grows 2-fold with a warm-up of 1 step, which is none"),
        (16, {"warmup": 1} | LONG, None),
        (16, {"warmup": 0} | LONG, None),
        (16, {"warmup": 3} | LONG, None),
    ],
)  # fmt: skip
def test_what_deserves_a_second_look_gets_a_warning(replicas: int, before: dict[str, Any], warning: str | None) -> None:
    warnings = list(scale(recipe(batch=128, **before), 8, replicas).warnings)
    assert [text for text in warnings if warning and text.startswith(warning)] == warnings
    assert len(warnings) == (warning is not None)


@pytest.mark.parametrize(
    ("tuned", "replicas", "before"),
    [
        (1, 16, DIGITS | {"optimizer": SGD}),
        (1, 16, DIGITS | {"optimizer": SGD, "gradientNoiseScale": "420"}),
        (1, 16, DIGITS | {"optimizer": SGD, "gradientNoiseScale": "420", "scaling": {"learningRate": "Linear"}}),
        (1, 16, {"batch": 32, "epochs": 5, "dataset": 1437, "optimizer": SGD, "scaling": {"learningRate": "Linear"}}),
        (8, 256, {"batch": 256, "optimizer": SGD} | IMAGENET),
        (8, 512, {"batch": 256, "optimizer": SGD} | IMAGENET),
        (128, 256, {"batch": 8192, "optimizer": SGD} | IMAGENET),
        (8, 256, {"batch": 256, "optimizer": SGD, "warmup": 0} | IMAGENET | {"scaling": {"learningRate": "Linear"}}),
    ],
    ids=str,
)
def test_a_warning_has_the_number_that_caused_it_and_the_field_that_ends_it(
    tuned: int, replicas: int, before: dict[str, Any], snapshot: SnapshotAssertion
) -> None:
    assert list(scale(recipe(**before), tuned, replicas).warnings) == snapshot


@pytest.mark.parametrize(
    ("tuned", "replicas", "batch", "at_once", "accumulation"),
    [
        # The fewest passes whose part is at most as large as the one a replica was tuned with.
        (32, 8, 1024, 32, 4),
        (32, 16, 96 * 32, 96, 2),
        (8, 8, 1024, 128, 1),
        (8, 64, 1024, 16, 1),
        (6, 4, 60, 5, 3),
    ],
)
def test_a_smaller_slice_accumulates_a_constant_global_batch(
    tuned: int, replicas: int, batch: int, at_once: int, accumulation: int
) -> None:
    before = recipe(batch=batch, scaling={"batch": "GlobalConstant"})
    scaled = scale(before, tuned, replicas)
    assert scaled.batch.total == batch == replicas * scaled.batch.per_replica * scaled.batch.accumulation
    assert (scaled.batch.per_replica, scaled.batch.accumulation) == (at_once, accumulation)
    assert (scaled.factor, scaled.learning_rate) == (1, before.optimizer.learning_rate)


def test_betas_and_averages_keep_their_memory_in_examples_on_request() -> None:
    optimizer = {"name": "adamw", "learningRate": "3e-4", "beta2": "0.999", "weightDecay": "0.1"}
    scaling = {"betas": True, "weightDecay": True, "ema": True}
    before = {"batch": 256, "optimizer": optimizer, "emaDecay": "0.9999"}

    scaled = scale(recipe(**before, scaling=scaling), 8, 32)
    assert (scaled.betas["beta2"], scaled.weight_decay, scaled.ema_decay) == ("0.996005996", "0.2", "0.99960006")
    assert (scaled.betas, scaled.epsilon) == ({"beta2": "0.996005996"}, "5e-9")

    unscaled = scale(recipe(**before), 8, 32)
    assert (unscaled.betas, unscaled.weight_decay, unscaled.ema_decay) == ({"beta2": "0.999"}, "0.1", "0.9999")
    assert unscaled.epsilon is None


@pytest.mark.parametrize(
    ("optimizer", "decay", "betas", "epsilon"),
    [
        # The trainer's defaults count where the recipe leaves a field out.
        ({"name": "adamw"}, "0.02", {"beta2": "0.996005996"}, "5e-9"),
        ({"name": "adam", "epsilon": "1e-6"}, None, {"beta2": "0.996005996"}, "5e-7"),
        (
            {"name": "adam", "beta1": "0.8", "beta2": "0.99"},
            None,
            {"beta1": "0.8", "beta2": "0.96059601"},
            "5e-9",
        ),
        ({"name": "lion", "weightDecay": "0.1"}, "0.2", {"beta2": "0.96059601"}, None),
        ({"name": "rmsprop", "epsilon": "1e-6"}, None, {"beta2": "0.96059601"}, "5e-7"),
        # Decay that is part of the gradient follows the rate by itself.
        ({"name": "sgd", "weightDecay": "0.1"}, "0.1", {}, None),
        ({"name": "adam", "weightDecay": "0.1"}, "0.1", {"beta2": "0.996005996"}, "5e-9"),
        ({"name": "adamw8bit", "weightDecay": "0.1"}, "0.2", {}, None),
        ({"name": "lamb", "weightDecay": "0.1", "beta2": "0.999"}, "0.2", {"beta2": "0.996005996"}, None),
        ({"name": "sophia", "weightDecay": "0.1"}, "0.1", {}, None),
    ],
    ids=str,
)
def test_decays_follow_what_their_optimizer_does_with_them(
    optimizer: dict[str, str], decay: str | None, betas: dict[str, str], epsilon: str | None
) -> None:
    before = recipe(optimizer={"learningRate": "3e-4", **optimizer}, scaling={"betas": True, "weightDecay": True})
    scaled = scale(before, 8, 32)
    assert (scaled.weight_decay, scaled.betas, scaled.epsilon) == (decay, betas, epsilon)
    not_applied = decay == optimizer.get("weightDecay", "0.01") and decay is not None
    assert any("weightDecay is not applied" in text for text in scaled.warnings) == not_applied


def test_rate_times_decay_times_steps_stays_whatever_caps_the_rate() -> None:
    """AdamW's decay over the whole training is 1e-3 x 0.1 x 1000, capped or not."""
    optimizer = {"name": "adamw", "learningRate": "1e-3", "weightDecay": "0.1"}
    scaling = {"weightDecay": True, "maxLearningRate": "0.001"}
    scaled = scale(recipe(batch=512, steps=1024, optimizer=optimizer, scaling=scaling), 1, 16)
    assert (scaled.learning_rate, scaled.weight_decay, scaled.train_steps) == ("0.001", "1.6", 64)


@given(k=st.integers(1, 64), limit=st.integers(1, 40))
def test_weight_decay_keeps_its_time_scale_in_epochs_whatever_caps_the_rate(k: int, limit: int) -> None:
    optimizer = {"name": "adamw", "learningRate": "3e-4", "weightDecay": "0.1"}
    scaling = {"weightDecay": True, "maxLearningRate": f"{limit}e-4"}
    scaled = scale(recipe(batch=256, optimizer=optimizer, scaling=scaling), 8, 8 * k)
    assert scaled.weight_decay is not None
    shrinks_by_epoch = float(scaled.learning_rate) * float(scaled.weight_decay) / k
    assert shrinks_by_epoch == pytest.approx(3e-4 * 0.1, rel=1e-8)


@pytest.mark.parametrize(("rule", "decay"), [("Linear", "0.1"), ("SquareRoot", "0.2"), ("Unscaled", "0.4")])
def test_weight_decay_compensates_for_the_learning_rate(rule: str, decay: str) -> None:
    optimizer = {"name": "adamw", "learningRate": "3e-4", "weightDecay": "0.1"}
    before = recipe(batch=256, optimizer=optimizer, scaling={"learningRate": rule, "weightDecay": True})
    assert scale(before, 8, 32).weight_decay == decay


@pytest.mark.parametrize(("replicas", "per_epoch"), [(8, 5004), (32, 1251), (256, 156)])
def test_milestones_in_epochs_are_at_the_ends_of_these_epochs_on_every_slice(replicas: int, per_epoch: int) -> None:
    schedule = {"name": "Step", "milestoneEpochs": [30, 60, 90]}
    scaled = scale(recipe(batch=256, epochs=90, dataset=1_281_167, schedule=schedule), 8, replicas)
    assert scaled.milestones == (30 * per_epoch, 60 * per_epoch, scaled.train_steps)


def test_milestones_and_evaluations_keep_their_number_of_examples() -> None:
    schedule = {"name": "Step", "milestones": [30, 61]}
    scaled = scale(recipe(batch=64, schedule=schedule, evaluateEverySteps=10), 8, 32)
    assert (scaled.milestones, scaled.evaluate_every_steps) == ((8, 16), 2)
    assert "milestones: 30, 61 x 1/4 = 8, 16 (the same examples, rounded up)" in map(str, scaled.notes)
    assert scale(recipe(batch=64, evaluateEverySteps=1), 8, 32).evaluate_every_steps == 1


def test_lamb_and_lars_keep_the_steps_of_their_warm_up() -> None:
    """You et al. 2020: the examples of the warm-up grow in proportion to the batch."""
    for name in ("lamb", "lars"):
        before = recipe(batch=512, steps=10_000, warmup=100, optimizer={"name": name, "learningRate": "0.01"})
        scaled = scale(before, 8, 128)
        assert (scaled.warmup_steps, scaled.learning_rate) == (100, "0.04")


EPOCHS = {"batch": 128, "epochs": 10, "dataset": 10_000}


@pytest.mark.parametrize(("replicas", "warmup", "every"), [(8, 156, 78), (32, 38, 19), (64, 18, 9)])
def test_warm_up_and_evaluations_in_epochs_are_those_epochs_on_every_slice(
    replicas: int, warmup: int, every: int
) -> None:
    scaled = scale(recipe(**EPOCHS, warmupEpochs=2, evaluateEveryEpochs=1), 8, replicas)
    assert (scaled.warmup_steps, scaled.evaluate_every_steps, scaled.train_steps) == (warmup, every, 10 * every)
    assert not any("rounded" in text for text in scaled.warnings)


STOP = {"metric": "accuracy", "mode": "Max"}


@pytest.mark.parametrize(
    ("every", "k", "steps", "patience", "says"),
    [
        (16, 16, 1, 8, False),
        (3, 1, 3, 8, False),
        # An evaluation a step, so 16 of the recipe's steps, where the recipe waits for 8 x 3.
        (3, 16, 1, 2, True),
        (2, 16, 1, 1, True),
        (40, 16, 2, 10, True),
        (500, 16, 31, 8, False),
    ],
)
def test_patience_makes_up_for_the_rounding_of_the_evaluations(
    every: int, k: int, steps: int, patience: int, says: bool
) -> None:
    schedule = {"name": "Plateau", **STOP, "patience": 8}
    changes = {"evaluateEverySteps": every, "stopEarly": STOP | {"patience": 8}, "schedule": schedule}
    scaled = scale(recipe(batch=32, steps=100_000, **changes), 1, k)
    assert (scaled.evaluate_every_steps, scaled.stop_patience, scaled.plateau_patience) == (steps, patience, patience)
    assert any(text.startswith(f"evaluateEverySteps {every} would be") for text in scaled.warnings) == says


def test_the_same_loss_takes_more_examples_of_everything() -> None:
    """Digits at 16 times the batch with a noise scale of 420: 1 + 512/420 over 1 + 32/420 is 2.0619."""
    schedule = {"name": "Step", "milestones": [600]}
    before = DIGITS | {"gradientNoiseScale": "420", "schedule": schedule, "evaluateEverySteps": 160}
    same_examples, same_loss = (
        scale(recipe(**before, scaling={"steps": steps}), 1, 16) for steps in ("SameExamples", "SameLoss")
    )
    assert (same_examples.train_steps, same_examples.warmup_steps, same_examples.milestones) == (76, 6, (38,))
    assert (same_loss.train_steps, same_loss.warmup_steps, same_loss.milestones) == (157, 11, (78,))
    assert (same_examples.evaluate_every_steps, same_loss.evaluate_every_steps) == (10, 21)
    assert same_loss.learning_rate == same_examples.learning_rate
    for scaled in (same_examples, same_loss):
        [steps] = [note.rule for note in scaled.notes if note.field == "trainSteps"]
        assert steps.endswith("the same loss takes about 2.06 times the recipe's)")
        warns = any("needs about 2.06 times the recipe's examples" in text for text in scaled.warnings)
        assert warns == (scaled is same_examples)


@pytest.mark.parametrize(
    ("data", "k", "text"),
    [
        (60_000, 2, None),  # The rate grows 1.68-fold.
        (60_000, 4, "-fold in a training that sees 0.21 of its data"),
        (None, 4, "may see its data only once (recipe.datasetSize)"),
        (8_000, 4, None),  # Two passes.
    ],
)
def test_of_a_rate_that_grows_in_less_than_one_pass_the_plan_warns(data: int | None, k: int, text: str | None) -> None:
    """docs/scaling.md, the text with SGD: with SameLoss it lost nothing at 2 times the batch and all at 4 times."""
    before = {"batch": 8, "steps": 1000, "gradientNoiseScale": "34", "optimizer": SGD}
    data_set = {} if data is None else {"dataset": data}
    scaled = scale(recipe(**before, **data_set, scaling={"steps": "SameLoss"}), 1, k)
    warned = [warning for warning in scaled.warnings if "most that the model bears" in warning]
    assert len(warned) == (text is not None)
    assert all(text is not None and text in warning for warning in warned)


@given(noise=st.integers(1, 10**6), k=st.integers(2, 256), epochs=st.integers(1, 300))
def test_the_same_loss_takes_as_many_more_epochs_as_steps(noise: int, k: int, epochs: int) -> None:
    before = {"epochs": epochs, "dataset": 10**6, "batch": 32, "gradientNoiseScale": noise, "warmupEpochs": 1}
    scaled = scale(recipe(**before, scaling={"steps": "SameLoss"}), 1, k)
    times = (1 + Fraction(32 * k, noise)) / (1 + Fraction(32, noise))
    assert 0 <= scaled.train_steps - epochs * (10**6 // (32 * k)) * times < 1
    assert 0 <= scaled.warmup_steps - (10**6 // (32 * k)) * times < 1


@pytest.mark.parametrize(
    ("before", "field", "way_out"),
    [
        ({"batch": 100}, "globalBatchSize", "nearest: 96 or 104"),
        ({"batch": 104, "scaling": {"batch": "GlobalConstant"}}, "globalBatchSize", "nearest: 96 or 128"),
        ({"batch": 5}, "globalBatchSize", "nearest: 8"),
        ({"batch": 128, "epochs": 3, "dataset": 511}, "datasetSize", "use a smaller slice"),
    ],
    ids=str,
)
def test_what_cannot_be_scaled_is_a_problem_with_a_solution(
    before: dict[str, Any], field: str, way_out: str, snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(InvalidJob) as caught:
        scale(recipe(**before), 8, 32)
    [problem] = caught.value.problems
    assert problem.field == f"spec.recipe.{field}"
    assert problem.message == snapshot
    assert way_out in problem.message


def test_every_number_comes_with_its_rule(snapshot: SnapshotAssertion) -> None:
    notes = [str(note) for note in scale(recipe(batch=1024, steps=1000, warmup=100), 8, 32).notes]
    assert [note.partition(":")[0] for note in notes] == [
        "globalBatchSize",
        "trainSteps",
        "warmupSteps",
        "learningRate",
    ]
    assert [re.findall(r" = ([\d.]+)", note) for note in notes] == [["4096"], ["250"], ["25"], ["0.4"]]
    assert notes == snapshot


def test_the_status_has_every_warning_of_the_plan_and_at_most_32_notes() -> None:
    everything = {
        "optimizer": {"name": "sgd", "learningRate": "0.1", "beta1": "0.9", "beta2": "0.9", "epsilon": "1e-9"},
        "scaling": {"learningRate": "Linear", "betas": True, "weightDecay": True, "ema": True},
        "schedule": {"name": "Plateau", **STOP, "patience": 99},
        "stopEarly": STOP | {"patience": 99},
        "evaluateEverySteps": 999,
        "warmupSteps": 400,
        "tunedOn": {"acceleratorType": "v5litepod-1"},
        "globalBatchSize": 12,
    }
    resolution = resolve(spec({f"recipe.{name}": value for name, value in everything.items()}))
    assert len(resolution.warnings) > 10
    assert resolution.resolved.warnings == list(resolution.warnings)
    many = replace(resolution, warnings=tuple(f"warning {number}" for number in range(40)))
    assert many.resolved.warnings == list(many.warnings[:32])


def test_a_recipe_without_tuned_on_is_used_unchanged() -> None:
    scaled = resolve(spec({"slice.acceleratorType": "v4-128", "recipe.globalBatchSize": 640})).recipe
    assert (scaled.factor, scaled.batch.total, scaled.train_steps) == (Fraction(1), 640, 300)
    assert scaled.learning_rate == "0.1"


_REPLICAS = st.integers(1, 4096)
_PER_REPLICA = st.integers(1, 1024)
_STEPS = st.integers(1, 10**7)


def _scaled(per_replica: int, steps: int, tuned: int, replicas: int, warmup: int = 0) -> ScaledRecipe:
    return scale(recipe(batch=per_replica * tuned, steps=steps, warmup=warmup), tuned, replicas)


@given(per_replica=_PER_REPLICA, steps=_STEPS, tuned=_REPLICAS, replicas=_REPLICAS)
def test_the_training_sees_the_recipes_examples_and_less_than_a_batch_more(
    per_replica: int, steps: int, tuned: int, replicas: int
) -> None:
    scaled = _scaled(per_replica, steps, tuned, replicas)
    more = scaled.train_steps * scaled.batch.total - steps * per_replica * tuned
    assert 0 <= more < scaled.batch.total


@given(per_replica=_PER_REPLICA, steps=_STEPS, tuned=_REPLICAS, replicas=_REPLICAS)
def test_the_global_batch_is_the_sum_of_the_replicas_batches(
    per_replica: int, steps: int, tuned: int, replicas: int
) -> None:
    scaled = _scaled(per_replica, steps, tuned, replicas)
    assert scaled.batch.per_replica == per_replica
    assert scaled.batch.total == replicas * per_replica


@given(per_replica=_PER_REPLICA, steps=_STEPS, tuned=_REPLICAS, replicas=_REPLICAS, warmup=st.integers(0, 500_000))
def test_scaling_there_and_back_is_the_identity_if_no_step_is_rounded(
    per_replica: int, steps: int, tuned: int, replicas: int, warmup: int
) -> None:
    steps, warmup = steps * replicas, warmup * replicas
    there = _scaled(per_replica, steps, tuned, replicas, warmup)
    back = _scaled(there.batch.per_replica, there.train_steps, replicas, tuned, there.warmup_steps)
    assert (back.batch.total, back.train_steps, back.warmup_steps) == (per_replica * tuned, steps, warmup)


@given(
    mantissa=st.integers(1, 9999),
    exponent=st.integers(-60, 14),
    tuned=_REPLICAS,
    replicas=_REPLICAS,
    name=st.sampled_from(["sgd", "adam", "sophia"]),
)
def test_the_learning_rate_is_positive_and_grows_as_its_rule_says(
    mantissa: int, exponent: int, tuned: int, replicas: int, name: str
) -> None:
    given_rate = f"{mantissa}e{exponent}"
    before = recipe(batch=tuned, optimizer={"name": name, "learningRate": given_rate})
    rate = Decimal(scale(before, tuned, replicas).learning_rate)
    k = replicas / tuned
    grows = {"sgd": min(k, 4), "adam": k**0.5, "sophia": 1.0}[name]
    assert float(rate) == pytest.approx(float(given_rate) * grows, rel=1e-8)
    assert rate > 0


@given(
    noise=st.floats(1e-3, 1e9),
    tuned=st.integers(1, 10**5),
    replicas=st.integers(1, 4096),
    name=st.sampled_from(["sgd", "adam"]),
)
def test_with_a_noise_scale_the_rate_is_the_one_that_saves_most_loss(
    noise: float, tuned: int, replicas: int, name: str
) -> None:
    """McCandlish et al. 2018, section 2.2, for a gradient of length 1 and curvature 1: with B examples a step of rate e
    saves e - (1 + Bn/B) e^2 / 2, which is most where (1 + Bn/B) e is 1."""
    best = 1 / (1 + noise / tuned)
    before = recipe(batch=tuned, gradientNoiseScale=noise, optimizer={"name": name, "learningRate": best})
    scaled = scale(before, 1, replicas)
    multiplier = float(scaled.learning_rate) / best
    rate = best * (multiplier if name == "sgd" else multiplier**2)
    assert (1 + noise / scaled.batch.total) * rate == pytest.approx(1, rel=0.02)


@given(noise=st.fractions(Fraction(1, 1000), 10**9), tuned=st.integers(1, 10**6), batch=st.integers(1, 10**9))
def test_the_same_loss_takes_examples_and_steps_as_the_noise_scale_says(
    noise: Fraction, tuned: int, batch: int
) -> None:
    """McCandlish et al. 2018, section 2.3: (S / S_min - 1) (E / E_min - 1) = 1, with E_min = Bn S_min."""
    examples = 1 + Fraction(tuned) / noise  # In units of E_min; the steps, in units of S_min, are E / B Bn.
    assert (examples * noise / tuned - 1) * (examples - 1) == 1
    more = examples * examples_multiplier(noise, tuned, batch)
    assert (more * noise / batch - 1) * (more - 1) == 1
    assert best_multiplier(noise, tuned, batch) * examples_multiplier(noise, tuned, batch) == Fraction(batch, tuned)
