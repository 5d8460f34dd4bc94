"""A History as a JSON file beside the report, so that a restarted run goes on with it.

Evidence for people, not state of the training: a file that cannot be read is passed over.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from tpu_trainer.clock import Phase
from tpu_trainer.telemetry.history import Attempt, Evaluation, Loss, Recorded, Stretch, Warned

SCHEMA = "history/v1"


def dump_history(recorded: Recorded, uid: str) -> bytes:
    """`uid`: the job's; only runs of the same job go on with each other's history. NaN is written as Python does."""
    return json.dumps({"schema": SCHEMA, "uid": uid, "recorded": asdict(recorded)}).encode()


def load_history(document: bytes, uid: str) -> Recorded | None:
    """What `dump_history` wrote for the same job; None for anything else."""
    try:
        found = json.loads(document)
        if (found["schema"], found["uid"]) != (SCHEMA, uid):
            return None
        return _recorded(found["recorded"])
    except (ValueError, KeyError, TypeError):
        return None


def _recorded(found: dict[str, Any]) -> Recorded:
    losses, stretches, evaluations = (int(stride) for stride in found.pop("strides"))
    return Recorded(
        losses=[Loss(**row) for row in found.pop("losses")],
        stretches=[Stretch(**_with_phases(row)) for row in found.pop("stretches")],
        evaluations=[Evaluation(**row) for row in found.pop("evaluations")],
        warnings=[Warned(**row) for row in found.pop("warnings")],
        attempts=[Attempt(**_with_phases(row)) for row in found.pop("attempts")],
        strides=(losses, stretches, evaluations),
        **found,
    )


def _with_phases(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "split": {Phase(phase): seconds for phase, seconds in row["split"].items()}}
