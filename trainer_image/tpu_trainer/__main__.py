"""`python -m tpu_trainer`: what a worker pod and a local host run; `compile-check` after it looks at the step only."""

import sys

COMPILE_CHECK = "compile-check"

# Guarded, because the processes per chip import this module again.
if __name__ == "__main__":
    if sys.argv[1:2] == [COMPILE_CHECK]:
        from tpu_trainer.checks.compile import command

        sys.exit(command.main(sys.argv[2:]))
    from tpu_trainer.worker.entry import main

    sys.exit(main())
