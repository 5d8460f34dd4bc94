"""What a terminal obeys, as a stranger may write it; and how to see that nothing of it is left."""

import re

HOSTILE = (
    "\x1b[2J\x1b[Hcleared \x1b]0;another title\x07 \x1b]52;c;cHduZWQ=\x1b\\ \x9b31mred \x9d0;title\x9c"
    " \x1bPq\x1b\\ \x1b]8;;http://example.com\x07link\x1b]8;;\x07 \x1bc \x00\x07\x08\x7f up\rdown \u202egnp.exe\u2066"
)
SHOWN = "cleared    red      link    updown gnp.exe"
"""What is left of it where newlines are not counted."""

# Everything a terminal may obey, but for what rich itself writes: colours, and where the cursor goes.
_OF_RICH = re.compile(r"\x1b\[(\?25[lh]|[0-9;]*m|[0-9]*[ABCDGK]|2K)|\r")
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def obeyed(output: str) -> list[str]:
    """The parts of the output that a terminal would obey, except what rich writes."""
    return _OBEYED.findall(_OF_RICH.sub("", output))
