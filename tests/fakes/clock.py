"""A clock that the test holds."""

from dataclasses import dataclass
from typing import Any


@dataclass
class Clock:
    """`now`: seconds, or a datetime where the product reads one."""

    now: Any = 0.0

    def __call__(self) -> Any:
        return self.now
