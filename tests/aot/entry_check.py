"""`python -m tpu_trainer entry-check`, forked."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv[1:] = ["entry-check"]
    runpy.run_module("tpu_trainer", run_name="__main__", alter_sys=True)
