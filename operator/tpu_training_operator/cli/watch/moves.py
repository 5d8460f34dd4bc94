"""How a job got to its slice, and what each slice has cost, as text."""

from collections.abc import Iterator
from datetime import datetime

from tpu_training_operator.api.status import Move, Placement
from tpu_training_operator.cli.common.words import ago
from tpu_training_operator.domain.cluster_state.observed import parse_time
from tpu_training_operator.domain.plan.stopping.budget import hours


def moved(placement: Placement | None, now: datetime) -> Iterator[str]:
    """A line for each move that the status has kept, the newest last; none for a job that never moved."""
    if placement is None or not placement.moves:
        return
    for move in placement.moves:
        yield f"{ago(parse_time(move.at), now)}: {move_words(move)}"
    spent = [f"{name} {hours(seconds)}" for name, seconds in placement.chip_seconds.items()]
    if spent:
        yield f"chip-hours: {', '.join(spent)}"


def move_words(move: Move) -> str:
    """v6e-16 to v5p-32 at step 120: 4 placeholders hold the nodes of v5p-32; ..."""
    before, after = move.from_slice or f"slice {move.from_}", move.to_slice or f"slice {move.to}"
    step = f" at step {move.step}" if move.step else ""
    return f"{before} to {after}{step}: {move.why}"
