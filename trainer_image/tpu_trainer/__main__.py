"""`python -m tpu_trainer`: what a worker pod and a local host run."""

import sys

from tpu_trainer.entry import main

# Guarded, because the processes per chip import this module again.
if __name__ == "__main__":
    sys.exit(main())
