"""Where a module's logger writes: event files beside the report, or a temporary directory without one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tpu_trainer.contract.errors import TrainerError
from tpu_trainer.storage import open_store

FOLDER = "lightning"


class Logs:
    """`place`: the report's, None without one; `scratch`: a directory that ends with the process."""

    def __init__(self, place: str | None, scratch: Path, attempt: int) -> None:
        self._place, self._attempt = place, attempt
        self._local = place is not None and place.startswith("/")
        self.directory = Path(place) if place is not None and self._local else scratch

    def logger(self, lightning: Any) -> Any:
        """For `self.logger`: TensorBoard's, or else one that writes CSV files."""
        options = {"save_dir": str(self.directory), "name": FOLDER, "version": f"attempt-{self._attempt}"}
        try:
            return lightning.loggers.TensorBoardLogger(**options)
        except ModuleNotFoundError:
            return lightning.loggers.CSVLogger(**options)

    def upload(self) -> None:
        """What was written for a report in a bucket; a failure does not end the run."""
        if self._place is None or self._local:
            return
        try:
            store = open_store(self._place, "report.uri")
            for file in sorted((self.directory / FOLDER).rglob("*")):
                if file.is_file():
                    store.put(file.relative_to(self.directory).as_posix(), file.read_bytes())
        except (OSError, TrainerError) as error:
            print(f"report: the module's logs are not written: {error}", file=sys.stderr, flush=True)
