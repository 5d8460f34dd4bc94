"""Traces several steps in one process, which is forked.

It reads each NAME.json in the folder TEST_STEPS, a run spec, and writes beside it, as NAME.traced, what `tracing`
answers. TEST_EXAMPLES: how many are read for a batch, if not all.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from tpu_trainer.checks.compile import tracing

if TYPE_CHECKING:
    from torch import Tensor

UNREDUCED = "unreduced"
"""A case whose name begins so leaves the gradients as they are: what the exchange costs is the difference."""


class _Unreduced(tracing.UncompiledChip):
    def reduce(self, gradients: Sequence[Tensor], signals: Tensor) -> tuple[list[Tensor], Tensor]:
        self._reduced = True
        return list(gradients), signals


def main(directory: Path, examples: int | None) -> None:
    # A trace looks for its tensors among all objects: not among the hundred thousands of the imports.
    gc.freeze()
    for path in sorted(directory.glob("*.json")):
        chip = _Unreduced if path.name.startswith(UNREDUCED) else tracing.UncompiledChip
        with mock.patch.object(tracing, "UncompiledChip", chip):
            traced = tracing.traced_step({"spec": json.loads(path.read_bytes()), "examples": examples})
        path.with_suffix(".traced").write_text(json.dumps(traced))
        # What lives on would pass for the next step's.
        gc.collect()
    os._exit(0)


if __name__ == "__main__":
    main(Path(os.environ["TEST_STEPS"]), json.loads(os.environ["TEST_EXAMPLES"]))
