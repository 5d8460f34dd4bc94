"""Which checkpoint has the best evaluation: COMMITs say so themselves, so nothing beside them can be lost or stale."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from tpu_trainer.checkpoint.catalogue import Candidate, CheckpointTarget, is_complete, survey
from tpu_trainer.checkpoint.commit import COMMIT, Commit, Evaluation, Folder
from tpu_trainer.contract.outcome import Best
from tpu_trainer.contract.spec import BestSpec, Mode


def best_of(among: Iterable[Candidate], by: BestSpec) -> Best | None:
    """None if no evaluation of them has a finite value. Of equal ones, that which has seen the fewest examples."""
    found = []
    for commit, entry in among:
        value = (commit.evaluation or {}).get(by.metric)
        if value is not None and math.isfinite(value):
            found.append((value if by.mode is Mode.MIN else -value, commit.examples, str(entry.folder), entry.folder))
    if not found:
        return None
    value, *_, folder = min(found)
    return Best(str(folder), folder.step, by.metric, value if by.mode is Mode.MIN else -value)


def best_in(target: CheckpointTarget) -> Best | None:
    """The best of all checkpoints that the job may continue unasked; None without checkpoint.keepBest.

    Raises:
        StorageError: the storage refuses.
    """
    if target.best is None:
        return None
    author = target.author
    usable = [
        (commit, entry)
        for commit, entry in survey(target.store).candidates
        if commit.author.fingerprint == author.fingerprint
        and author.may_continue(commit.author)
        and is_complete(target.store, (commit, entry))
    ]
    return best_of(usable, target.best)


def note_evaluation(target: CheckpointTarget, step: int, evaluation: Evaluation) -> None:
    """Adds the evaluation to the COMMIT that this process has written for `step`.

    Raises:
        StorageError: the storage refuses.
    """
    name = f"{Folder(step, target.author.job, target.author.attempt)}/{COMMIT}"
    commit = Commit.parse(target.store.read(name))
    target.store.put(name, replace(commit, evaluation=evaluation).to_json())
