"""What the commands print on a terminal: its width, ages, and lists of names."""

import shutil
from datetime import datetime
from typing import TYPE_CHECKING

from tpu_training_operator.api.words import duration

if TYPE_CHECKING:
    from rich.console import Console


def console(pipe_width: int) -> "Console":
    """Returns a console for stdout. A pipe has no width, and rich's default of 80 would break long lines into many."""
    # Importing rich takes as long as half of the API.
    from rich.console import Console

    default = Console(highlight=False)
    if not default.is_terminal:
        return Console(highlight=False, width=pipe_width)
    if default.is_dumb_terminal:
        # rich assumes that a dumb terminal has 80 columns.
        width, height = shutil.get_terminal_size()
        return Console(highlight=False, width=width, height=height)
    return default


def ago(moment: datetime, now: datetime) -> str:
    return f"{duration((now - moment).total_seconds())} ago"
