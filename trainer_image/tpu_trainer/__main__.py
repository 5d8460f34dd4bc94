"""`python -m tpu_trainer`: what a worker pod and a local host run.

Its first argument selects another command: `compile-check` compiles the step only, `entry-check` tries the task before
the job asks for its slice, `slice-check MODE` tries the slice itself (`tpu_contract.slice_check`), and
`run-command COMMAND...` fetches the job's code and executes the user's own loop.
"""

import sys

COMPILE_CHECK, ENTRY_CHECK, RUN_COMMAND, SLICE_CHECK = "compile-check", "entry-check", "run-command", "slice-check"

# Guarded, because each chip's process imports this module again.
if __name__ == "__main__":
    command = sys.argv[1] if sys.argv[1:] else None
    if command == COMPILE_CHECK:
        import signal

        from tpu_trainer.checks.compile.command import main as compile_check

        # Python's own handler would wait until the compiler is done.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        sys.exit(compile_check(sys.argv[2:]))
    if command == ENTRY_CHECK:
        from tpu_trainer.checks.entry.check import main as entry_check

        sys.exit(entry_check())
    if command == SLICE_CHECK:
        from tpu_trainer.checks.slice.command import main as slice_check

        sys.exit(slice_check(sys.argv[2:]))
    if command == RUN_COMMAND:
        from tpu_trainer.worker.code import main as run_command

        sys.exit(run_command(sys.argv[2:]))
    from tpu_trainer.worker.entry import main

    sys.exit(main())
