"""`python -m tpu_trainer` whose hosts divide checkpoints of any size: real ones are too large for a test.

The processes that a host starts import this module again, under a name that multiprocessing gives it.
"""

from __future__ import annotations

import sys

from tpu_trainer.checkpoint import parts
from tpu_trainer.worker.entry import main

if __name__ in ("__main__", "__mp_main__"):
    parts.PART_BYTES = 8

if __name__ == "__main__":
    sys.exit(main())
