"""Two operators that both believe they lead: whatever the order of their passes, each story ends as with one.

This is what a Lease cannot prevent (`runtime.leadership`). `test_machine` has stale reads and late watches as well.
"""

from collections.abc import Iterable
from datetime import timedelta
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner import kubelet
from tests.planner.operators import Crash, Operator
from tests.planner.scheduler import has_ended, place_all
from tests.planner.story import all_finish
from tests.planner.test_crashes import (
    ENOUGH_PASSES,
    NODES,
    STORIES,
    End,
    Story,
    all_are_placed_ready,
    attempt_runs,
    cluster_of,
    end_of,
)
from tests.planner.test_crashes import told as told_with_one

# Without those in which the outcome depends on when a pass comes, or pods of a lost node stay beside the next attempt.
TOLD = sorted(STORIES.keys() - {"hang", "deadline", "lost node", "silent node"})


def told_with_two(story: Story, turns: Iterable[tuple[int, int | None, bool]]) -> End:
    """`turns`: whose pass it is, after how many effects it dies, and whether it has heard what happened. Afterwards
    both work in turn."""
    cluster = cluster_of(story)
    operators = [Operator(cluster), Operator(cluster)]
    nodes = [*NODES, *(f"spare-{i}" for i in range(story.spare_nodes))]
    drawn = [*turns]
    later: list[tuple[int, int | None, bool]] = [(number % 2, None, True) for number in range(2 * ENOUGH_PASSES)]
    quiet = 0
    for which, lives_for, hears in drawn + later:
        done = operators[which].work(lives_for=lives_for, has_heard_all=hears)
        attempts = {name.split("-")[1] for name, pod in cluster.pods.items() if not has_ended(pod)}
        assert len(attempts) <= 1, "workers of two attempts run at once"
        cluster.now += timedelta(seconds=1) if isinstance(done.error, Crash) else done.again or timedelta(seconds=1)
        story.trouble(cluster, operators[which])
        kubelet.sweep(cluster)
        cluster.collect_garbage()
        place_all(cluster, nodes)
        if attempt_runs(cluster, story.lasts):
            all_finish(cluster)
        quiet = quiet + 1 if done.error is None and not done.effects else 0
        if quiet > 3 and end_of(cluster).ready[1] == story.end:
            return end_of(cluster)
        all_are_placed_ready(cluster)
    raise AssertionError(f"this does not come to an end: {end_of(cluster)}")


TURN = st.tuples(st.integers(0, 1), st.none() | st.integers(0, 6), st.booleans())


@settings(max_examples=50)
@given(name=st.sampled_from(TOLD), turns=st.lists(TURN, max_size=40))
def test_two_that_work_at_once_bring_every_story_to_the_end_that_one_brings_it_to(
    name: str, turns: list[tuple[int, int | None, bool]]
) -> None:
    assert told_with_two(STORIES[name], turns) == undisturbed(name)


@cache
def undisturbed(name: str) -> End:
    return told_with_one(STORIES[name], None)[0]
