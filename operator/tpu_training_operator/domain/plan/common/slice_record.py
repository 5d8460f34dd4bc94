"""The status's record of the slice that an attempt runs on, and of what the time there has cost.

The choice is written with the attempt, before anything is done (ADR 2, ADR 15), so every later pass of any operator
finds the attempt and its slice together.
"""

from collections.abc import Sequence
from datetime import datetime

from tpu_training_operator.api.conditions import ConditionType, is_true
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.status import MOST_MOVES, Move, Placement, PlacementReason, Status
from tpu_training_operator.domain.cluster_state.observed import Observed, WorkerPod, format_time
from tpu_training_operator.domain.job.options import SliceOption
from tpu_training_operator.domain.plan.common.accounts import charge_slice

FOR_CAPACITY = (PlacementReason.NO_CAPACITY, PlacementReason.NOT_ADMITTED)


def choose_option(options: Sequence[SliceOption], status: Status, pods: Sequence[WorkerPod]) -> SliceOption:
    """Returns the slice that the status names; spec.slice before the first attempt.

    If the status names none of the job's slices, the labels of the attempt's workers decide.
    """
    placement = status.placement
    named = [option for option in options if placement is not None and str(option) == placement.slice]
    if placement is not None and named:
        return next((option for option in named if option.number == placement.option_index), named[0])
    attempt = status.attempt or max((pod.worker.attempt for pod in pods), default=0)
    known = {option.number: option for option in options}
    labelled = (
        known[pod.option_number] for pod in pods if pod.worker.attempt == attempt and pod.option_number in known
    )
    return next(labelled, options[0])


def record_start(
    before: Placement | None, option: SliceOption, reason: PlacementReason, now: datetime, move: Move | None = None
) -> Placement:
    """Returns the placement of an attempt that begins. `move`: how the job came there, if it was elsewhere.

    An attempt on the slice where the job was before keeps that record: a suspension or an eviction does not change that
    the job has run there."""
    number, name = option.number, str(option)
    placement = before or Placement(slice=name, since=format_time(now), reason=str(reason))
    if before is None or (before.option_index, before.slice) != (number, name):
        placement = replace(placement, option_index=number, slice=name, since=format_time(now), has_run=False)
    if move is not None:
        searches = placement.moves_for_capacity + (reason in FOR_CAPACITY)
        placement = replace(placement, moves_for_capacity=searches, moves=_drop_moves([*placement.moves, move]))
    return replace(placement, reason=str(reason))


def complete_move(status: Status, observed: Observed, options: Sequence[SliceOption], option: SliceOption) -> Status:
    """Returns the status whose last move has what only shows after it was decided: the last step of the gang that was
    stopped, from its last words, and the step from which the training continued, as the new gang reports it."""
    placement = status.placement
    move = placement.moves[-1] if placement is not None and placement.moves else None
    before = next((one for one in options if move is not None and one.number == move.from_), None)
    # Without a step, nothing was trained. Later attempts on the new slice continue what that one has trained.
    if placement is None or move is None or move.step is None or before is None or move.continued_step is not None:
        return status
    size = before.resolution.recipe.batch.total
    reached = max(move.step, min(_last_words_step(observed, status.attempt, move), before.resolution.steps))
    report = observed.report
    if move.to == option.number and report and report.attempt == status.attempt and report.start_step is not None:
        examples = report.start_step * option.resolution.recipe.batch.total
        move = replace(move, continued_step=report.start_step, continued_examples=examples)
        reached = max(reached, examples // size)
    move = replace(move, step=reached, examples=reached * size)
    return replace(status, placement=replace(placement, moves=[*placement.moves[:-1], move]))


def _last_words_step(observed: Observed, attempt: int, move: Move) -> int:
    """Returns the last step that the gang on the slice before the move names in its termination messages."""
    stopped = [pod for pod in observed.before_attempt(attempt) if pod.option_number == move.from_]
    last = max((pod.worker.attempt for pod in stopped), default=0)
    words = (pod.trainer_message for pod in stopped if pod.worker.attempt == last)
    return max((said.step for said in words if said is not None and said.step is not None), default=0)


def reason_to_stay(placement: Placement | None, option: SliceOption) -> PlacementReason:
    """Returns why an attempt that begins on the job's present slice is on `option`."""
    if option.resolution.lower_rung is not None:
        return PlacementReason.RUNG
    if placement is not None and placement.reason in list(PlacementReason):
        return PlacementReason(placement.reason)
    return PlacementReason.STATUS_LOST if option.number else PlacementReason.PREFERRED


def _drop_moves(moves: Sequence[Move]) -> list[Move]:
    """Returns as many moves as the status has room for. Those for lack of capacity are dropped first."""
    moves_left = list(moves)
    while len(moves_left) > MOST_MOVES:
        moves_left.pop(next((i for i, move in enumerate(moves_left[:-1]) if move.reason in FOR_CAPACITY), 0))
    return moves_left


def is_wrong(status: Status, option: SliceOption) -> bool:
    """Returns whether the placement must be corrected. A job that began before placements existed gets its first one
    with the next write."""
    if status.placement is None:
        return status.attempt > 0 and option.number > 0
    return (status.placement.option_index, status.placement.slice) != (option.number, str(option))


def keep_record(after: Status, before: Status, option: SliceOption, now: datetime, *, begins: bool) -> Status:
    """Returns the status with the chips used since `before` charged to the slice of the attempt. An attempt without a
    placement gets one. `begins`: the attempt begins with this status, so its placement is right."""
    if after.attempt == 0:
        return after
    placement = after.placement
    if placement is None or (not begins and is_wrong(after, option)):
        placement = record_start(
            placement, option, PlacementReason.STATUS_LOST if option.number else PlacementReason.PREFERRED, now
        )
    if is_true(after.conditions, ConditionType.GANG_READY):
        # A fact, and not a comparison of times, which have whole seconds: a gang may be lost in the second in which it
        # became ready.
        placement = replace(placement, has_run=True, moves_for_capacity=0)
    return charge_slice(replace(after, placement=placement), before, str(option))
