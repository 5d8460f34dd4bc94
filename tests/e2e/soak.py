"""Whether the tests of failures are to be long: SOAK=1 in the environment, as `make soak` sets it."""

import os

SOAK = os.environ.get("SOAK") == "1"
