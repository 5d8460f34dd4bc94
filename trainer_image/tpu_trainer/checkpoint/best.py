"""Finds the checkpoint with the best evaluation. The evaluations are in the COMMITs, so no index can be out of date."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from tpu_contract.run_spec import BestSpec, Mode
from tpu_trainer.checkpoint.catalogue import Candidate, CheckpointTarget, is_complete, survey
from tpu_trainer.checkpoint.commit import COMMIT, Commit, Evaluation, Folder
from tpu_trainer.contract.outcome import Best


def best_of(candidates: Iterable[Candidate], by: BestSpec) -> Best | None:
    """Returns the best checkpoint; of equal ones, the one that has seen the fewest examples.

    None if none of them has an evaluation with a finite value.
    """
    ranked = []
    for commit, entry in candidates:
        value = (commit.evaluation or {}).get(by.metric)
        if value is not None and math.isfinite(value):
            ranked.append((value if by.mode is Mode.MIN else -value, commit.examples, str(entry.folder), entry.folder))
    if not ranked:
        return None
    value, *_, folder = min(ranked)
    return Best(str(folder), folder.step, by.metric, value if by.mode is Mode.MIN else -value)


def best_in(target: CheckpointTarget) -> Best | None:
    """Returns the best of all checkpoints that the job may continue unasked; None without checkpoint.keepBest.

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
