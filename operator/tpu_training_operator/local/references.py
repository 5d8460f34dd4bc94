"""`$(NAME)` in variables, commands and arguments, replaced as a kubelet does."""

import re
from collections.abc import Mapping

_DOLLAR = re.compile(r"\$\$|\$\(([^)]*)\)")


def expand(text: str, values: Mapping[str, str]) -> str:
    """The text with every `$(NAME)` replaced by its value. A name without a value stays as it is written, and `$$` is
    one dollar sign, so that `$$(NAME)` can be said, too."""

    def replacement(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else values.get(found[1], found[0])

    return _DOLLAR.sub(replacement, text)
