"""Makes text from other programs safe to show: a worker's last words, a registry's error, a report's warnings.

A terminal obeys what it is shown. An escape sequence can clear the screen, set the title or write to the clipboard, a
bidirectional control can make a line read like another one, and an invisible character can make two words look the
same. The operator removes them before it writes text into a status, and `tpujob` removes them again when it reads a
cluster, because another program may have written the status.
"""

import re
from typing import Any

from tpu_contract.words import cut

# CSI; OSC, DCS and the like, which carry text up to BEL or ST; all other escapes. None of them looks past the next
# control character, which bounds the time for any text.
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x00-\x1f\x7f-\x9f]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]"
)
# C0 except tab and newline, DEL, C1, controls and marks of writing direction, and characters without width.
_CONTROL = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\xad\\u061c\\u180e\\u200b\\u200e\\u200f\\u202a-\\u202e\\u2060-\\u206f\\ufeff"
    "\\ufff9-\\ufffb\\U000e0000-\\U000e007f]"
)
_LINE_END = re.compile("\r\n|[\r\u2028\u2029]")
# Joiners make one character of several in many scripts and in emoji, but not beside ASCII.
_JOINER = re.compile(r"(?<![^\x00-\x7f])[\u200c\u200d]+|[\u200c\u200d]+(?![^\x00-\x7f])")
# Halves of characters, which JSON can spell but UTF-8 cannot.
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def plain(text: str) -> str:
    """Returns the text with tab and newline as its only control characters; it never grows.

    Escape sequences are removed whole, so that coloured text stays readable. Every other line end becomes a
    newline, and half a character becomes a question mark.
    """
    if text.isprintable():
        return text
    text = _CONTROL.sub("", _SEQUENCE.sub("", _LINE_END.sub("\n", text)))
    return _JOINER.sub("", _SURROGATE.sub("?", text))


def one_line(text: str, most: int) -> str:
    return cut(" ".join(text.split()), most)


def plain_json(value: Any) -> Any:
    """Returns a JSON value with all its strings made plain, including names of fields."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {plain(name): plain_json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(inner) for inner in value]
    return value
