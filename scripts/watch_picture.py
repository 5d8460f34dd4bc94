"""Draws docs/watch.svg: the live table of a job that has lost its slice once, trained here on CPUs.

    .venv/bin/python scripts/watch_picture.py > docs/watch.svg

`tpujob run` and `tpujob watch` show the same table.
"""

import asyncio
import re
import sys
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console, RenderableType
from rich.text import Text

from tpu_training_operator.api.status import State
from tpu_training_operator.cli.common.changes import apply_options, rehearse
from tpu_training_operator.cli.common.job_file import load
from tpu_training_operator.cli.watch.display import screen
from tpu_training_operator.cli.watch.job_view import job_view
from tpu_training_operator.cli.watch.sections import headline, sections, state_style
from tpu_training_operator.domain.cluster_state.hosts import host_of
from tpu_training_operator.kube.cluster import Object
from tpu_training_operator.local.outages import parse_outage
from tpu_training_operator.local.run import run_job

JOB = Path(__file__).parents[1] / "examples" / "digits.yaml"
_CHANGES = ("recipe.trainSteps=40000", "recipe.evaluateEverySteps=400", "checkpoint.everySeconds=5")
_SHOWN_FROM_STEP = 2000
_LOST = "v5litepod-16:50-55"


def find_frame(directory: Path) -> RenderableType:
    """Returns the first table in which the second attempt has come far, and ends the run."""
    changes = (*_CHANGES, f"checkpoint.uri={directory / 'checkpoints'}")

    def change(body: Object) -> None:
        apply_options(body, changes, None)
        rehearse(body)

    file, interrupts = load(JOB, change=change), asyncio.Queue[None]()
    frames: list[RenderableType] = []

    def keep(job: Object, pods: list[Object]) -> None:
        view = job_view(job, [host for pod in pods if (host := host_of(pod))], datetime.now(UTC))
        progress = view.status.progress
        has_come_far = progress is not None and bool(progress.metrics) and progress.step >= _SHOWN_FROM_STEP
        if not frames and view.status.attempt > 1 and view.state is State.RUNNING and has_come_far:
            rows = [(section.label, section.brief, section.style) for section in sections(view, "tpujob")]
            frames.append(screen(headline(view), state_style(view), rows))
            interrupts.put_nowait(None)

    asyncio.run(run_job(file.body, directory, [], keep, interrupts, [parse_outage(_LOST, file.options)]))
    return frames[0]


def main() -> None:
    with TemporaryDirectory() as directory:
        frame = find_frame(Path(directory).resolve())
    console = Console(record=True, width=110, file=StringIO(), force_terminal=True)
    console.print(Text("$ tpujob watch digits", style="dim"))
    console.print(frame)
    # A picture loads no fonts from elsewhere.
    picture = console.export_svg(title="tpujob", unique_id="watch")
    sys.stdout.write(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))


if __name__ == "__main__":
    main()
