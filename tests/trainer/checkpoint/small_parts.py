"""`python -m tpu_trainer` whose hosts divide checkpoints of any size: real ones are too large for a test."""

from __future__ import annotations

import sys

from tpu_trainer.checkpoint import parts
from tpu_trainer.entry import main

if __name__ == "__main__":
    parts.PART_BYTES = 8
    sys.exit(main())
