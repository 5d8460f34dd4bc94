"""The name of a job in the whole cluster. Used by everything in `runtime` that keeps something per job."""

from dataclasses import dataclass


@dataclass(frozen=True)
class JobKey:
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"
