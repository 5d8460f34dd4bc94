"""The workers' logs as they grow, for users who want to see what their code prints."""

from collections.abc import Iterator
from pathlib import Path

_LONGEST_LINE = 4096


class Logs:
    """The logs below a run's directory of pods."""

    def __init__(self, pods_directory: Path) -> None:
        self._directory = pods_directory
        self._read: dict[Path, int] = {}

    def new_lines(self, *, whole: bool = False) -> Iterator[tuple[str, str]]:
        """Pod and line, for all lines since the last call. The last line is left out until it has ended; with `whole`
        it comes, too."""
        for path in sorted(self._directory.glob("*/log.txt")):
            start = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(start)
                new = file.read()
            until = len(new) if whole else new.rfind(b"\n") + 1
            # A line without an end would be read again and again.
            until = until or (len(new) if len(new) > _LONGEST_LINE else 0)
            self._read[path] = start + until
            for line in new[:until].decode(errors="replace").splitlines():
                yield path.parent.name, line
