"""How wide the output is: the terminal's width, or of a pipe one that suits what is printed."""

import shutil

from rich.console import Console


def console(pipe_width: int) -> Console:
    """A console for stdout. A pipe has no width, and rich's default of 80 would break long lines into many."""
    found = Console(highlight=False)
    if not found.is_terminal:
        return Console(highlight=False, width=pipe_width)
    if found.is_dumb_terminal:
        # Of these rich assumes 80 columns, whatever the window has.
        width, height = shutil.get_terminal_size()
        return Console(highlight=False, width=width, height=height)
    return found
