"""`python -m tpu_trainer` that also prints what its doctor has cost so far: `python -m bench.trainer.observed`.

The doctor keeps its own account; this prints it, and changes nothing else.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from bench.trainer.process import Line
from bench.trainer.reports import READ_EVERY, NotComparable

_LINE = re.compile(r"doctor at step (\d+): (\{.*\})")


def doctor_cost(lines: Sequence[Line], warm_up: int) -> dict[str, Any]:
    """Seconds per check: in total for the warm-up, and per step after it; and the seconds of a whole step.

    Raises NotComparable if there are fewer than two accounts after the warm-up.
    """
    told = [(line.at, found) for line in lines if (found := _LINE.match(line.text)) and int(found[1]) >= warm_up]
    if len(told) < 2:
        raise NotComparable(f"fewer than two accounts of the doctor after {warm_up} steps of warm-up")
    (begun, first), (ended, last) = told[0], told[-1]
    before, after, steps = json.loads(first[2]), json.loads(last[2]), int(last[1]) - int(first[1])
    per_step = {check: (after[check] - before[check]) / steps for check in after}
    return {"atStart": before, "perStep": per_step, "step": (ended - begun) / steps}


def main() -> int:
    from tpu_trainer.doctor import doctor
    from tpu_trainer.worker.entry import main as train

    class Observed(doctor.Doctor):
        def after_step(self, step: int, batch: Any) -> None:
            super().after_step(step, batch)
            if step % READ_EVERY == 0:
                print(f"doctor at step {step}: {json.dumps(self.seconds)}", flush=True)

    # This must run before `train` imports `replica`, which it does late.
    doctor.Doctor = Observed  # type: ignore[misc]
    return train()


if __name__ == "__main__":
    sys.exit(main())
