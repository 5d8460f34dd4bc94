"""The bench of recipes plans with the product's own planner, and its verdict finds what breaks the goal."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.recipes import tables, tuning
from bench.recipes.__main__ import EVERY_NUMBER, write_docs
from bench.recipes.chart import drawing
from bench.recipes.runs import PlannedRun, scaled_run
from bench.recipes.tasks import RULES, TASKS
from bench.recipes.verdict import Cell, cells, verdicts

ROOT = Path(__file__).parents[3]
NAME = "digits-sgd"
TABLES = ("measured", "reach", "warned", "tuned", "quality")
Plans = dict[tuple[str, str, int], list[PlannedRun]]


@pytest.fixture(scope="module")
def plans() -> Plans:
    tuned = tuning.tuned()[NAME]
    made = {
        (NAME, name, factor): [scaled_run(TASKS[NAME], tuned, seed, factor, rule) for seed in range(2)]
        for name, rule in RULES.items()
        for factor in (1, 4, 16)
    }
    # As if the planner had nothing to say of 4x.
    return {key: [replace(run, warnings=()) for run in runs] if key[2] == 4 else runs for key, runs in made.items()}


def judged(plans: Plans, accuracy: Mapping[tuple[str, int], float], said: tuple[str, ...] = ()) -> list[Cell]:
    """The cells, had every run reached 0.97, and those of a rule and factor in `accuracy` that value; a later run that
    computes the same replaces an earlier one. `said`: the warnings of every run."""
    known = {
        run.key: {"metrics": {"accuracy": accuracy.get((rule, factor), 0.97)}, "warnings": list(said)}
        for (_, rule, factor), runs in plans.items()
        for run in runs
    }
    return cells(plans, known)


def test_the_tuned_recipe_is_the_same_run_under_every_rule(plans: Plans) -> None:
    assert len({plans[NAME, rule, 1][0].key for rule in RULES}) == 1
    different = ("Unscaled", "SquareRoot", "Linear", "Auto, noise scale", "SameLoss", "AdaScale")
    assert len({plans[NAME, rule, 16][0].key for rule in different}) == len(different)


def test_the_rules_by_the_noise_scale_know_the_one_that_was_measured(plans: Plans) -> None:
    scaled = plans[NAME, "Auto, noise scale", 16][0].document["scaling"]
    [rule] = [row["rule"] for row in scaled if row["name"] == "learning rate"]
    assert f"noise scale {tuning.tuned()[NAME]['gradientNoiseScale']['value']}" in rule


@pytest.mark.parametrize("name", TASKS)
def test_every_recipe_is_tuned_inside_its_grid(name: str) -> None:
    recipe = tuning.tuned()[name]
    first, *inner, last = TASKS[name].rates
    assert recipe["learningRate"] in inner
    assert list(recipe["grid"]) == [first, *inner, last]
    assert float(recipe["gradientNoiseScale"]["value"]) > 0


def test_the_goal_holds_for_rules_that_lose_nothing(plans: Plans) -> None:
    assert not any(broken for _, broken in verdicts(judged(plans, {})))


def test_a_silent_loss_breaks_both_goals(plans: Plans) -> None:
    for_default, _, for_runs = (broken for _, broken in verdicts(judged(plans, {("Auto", 4): 0.9, ("Auto", 16): 0.5})))
    assert for_default == for_runs == ["digits-sgd, Auto, 4x: 7 points lost, WITHOUT a warning"]


def test_a_warning_of_the_run_is_enough_for_a_run_that_lost_much(plans: Plans) -> None:
    for_default, _, for_runs = (
        broken for _, broken in verdicts(judged(plans, {("Auto", 4): 0.9}, ("it did not learn",)))
    )
    assert for_default
    assert not for_runs


def test_the_tables_and_the_drawing_show_every_rule(plans: Plans) -> None:
    found = judged(plans, {("Auto", 16): 0.5})
    table = tables.quality_tables(found, tuning.tuned())
    assert ": 97.0±0.0 | 4x | 16x |" in table
    assert "| **50.0±0.0** ⚠ |" in table
    # At 16x Auto is the run that SquareRoot makes.
    assert "| 16x | 4x | 16x | 4x | 16x | 16x | 16x |" in tables.reach_table(found)
    assert "| Auto | 1 of 2 | 1 | 0 of 1 | 0 of 0 | 0 | 0 of 0 |" in tables.warnings_table(found)
    picture = "".join(ElementTree.fromstring(drawing(found)).itertext())
    assert all(rule in table and rule in picture for rule in RULES)


def test_every_table_has_its_place_in_one_of_the_two_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, every_number = tmp_path / "scaling.md", tmp_path / "measured.md"
    page.write_bytes((ROOT / "docs" / "scaling.md").read_bytes())
    every_number.write_bytes(EVERY_NUMBER.read_bytes())
    monkeypatch.setattr("bench.recipes.__main__.EVERY_NUMBER", every_number)

    write_docs(page, {name: f"the {name} table" for name in TABLES}, "<svg/>")

    written = page.read_text(encoding="utf-8") + every_number.read_text(encoding="utf-8")
    assert [written.count(f"\nthe {name} table\n<!-- end -->") for name in TABLES] == [1] * len(TABLES)
