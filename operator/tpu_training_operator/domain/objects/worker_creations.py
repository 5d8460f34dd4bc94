"""The stage that creates a gang's pods, each built when it is asked for. Made by the planner.

Thousands of pod bodies at once would be more than the operator's memory, and would stop the event loop for seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.domain.actions import Action, Create
from tpu_training_operator.domain.naming import WorkerId
from tpu_training_operator.domain.objects.worker_pod import worker_pod
from tpu_training_operator.domain.recipe.resolve import Resolution
from tpu_training_operator.domain.report import Reporting


@dataclass(frozen=True)
class WorkerCreations(Sequence[Action]):
    job: TPUTrainingJob
    resolution: Resolution
    workers: tuple[WorkerId, ...]
    reporting: Reporting | None
    avoid: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.workers)

    @overload
    def __getitem__(self, index: int) -> Action: ...

    @overload
    def __getitem__(self, index: slice) -> "WorkerCreations": ...

    def __getitem__(self, index: int | slice) -> "Action | WorkerCreations":
        if isinstance(index, slice):
            return replace(self, workers=self.workers[index])
        return Create(worker_pod(self.job, self.resolution, self.workers[index], self.reporting, self.avoid))
