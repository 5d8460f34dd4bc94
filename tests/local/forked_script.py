"""`python TEST_SCRIPT` in the folder TEST_FOLDER, forked from a process that has imported what the script does."""

import os
import runpy

if __name__ == "__main__":
    os.chdir(os.environ["TEST_FOLDER"])
    runpy.run_path(os.environ["TEST_SCRIPT"], run_name="__main__")
