"""What this program is called: usage lines and errors say it. Used by every command."""

import sys
from pathlib import Path


def program_name() -> str:
    """As the person called it: kubectl finds the program `kubectl-tpujob` and calls it for `kubectl tpujob`."""
    return "kubectl tpujob" if Path(sys.argv[0]).stem == "kubectl-tpujob" else "tpujob"
