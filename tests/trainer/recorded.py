"""What a run has recorded of itself: its `history.json`, as the tests read it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Recorded:
    """`document`: `recorded` of the file's schema; empty for a run that left no file."""

    document: dict[str, Any]

    @property
    def by_step(self) -> dict[int, float | None]:
        """The global loss of every step; None if it was not finite."""
        points = self.document.get("losses", ())
        assert all(point["count"] == 1 for point in points), "the run is too long for a point a step"
        return {point["step"]: point["mean"] for point in points}

    @property
    def losses(self) -> list[float | None]:
        return list(self.by_step.values())

    @property
    def evaluations(self) -> list[dict[str, float | None]]:
        """The metrics of every evaluation, with its step; None if not finite."""
        return [
            {name: value if math.isfinite(value) else None for name, value in made["metrics"].items()}
            | {"step": made["step"]}
            for made in self.document.get("evaluations", ())
        ]


def recorded(directory: Path) -> Recorded:
    file = directory / "history.json"
    return Recorded(json.loads(file.read_bytes())["recorded"] if file.exists() else {})
