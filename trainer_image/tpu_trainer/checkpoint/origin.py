"""Chooses where a job's training starts: at its own checkpoint, at one that checkpoint.resumeFrom names, or at step 0.

A job that continued another job's finished training would succeed without training anything. So a job continues unasked
only what it wrote itself, or what a job of the same name and recipe wrote before it was deleted and created again.
Everything else must be named in checkpoint.resumeFrom.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpu_trainer.checkpoint.catalogue import Candidate, LoadedCheckpoint, RejectedCheckpoint, Say, entries, read_checked
from tpu_trainer.checkpoint.commit import Author, Commit, Folder
from tpu_trainer.checkpoint.search import SearchCriteria, search
from tpu_trainer.checkpoint.snapshot import parse_snapshot
from tpu_trainer.contract.errors import (
    BadSpecError,
    CheckpointUnusableError,
    OtherModelError,
    StorageError,
    UserCodeError,
)
from tpu_trainer.storage import open_store
from tpu_trainer.storage.store import ObjectStore

_SETTING = "checkpoint.resumeFrom"
_MOST_DIFFERENCES = 4


@dataclass(frozen=True)
class CheckpointSource:
    """What checkpoint.resumeFrom or checkpoint.initFrom names: the newest checkpoint in `store`, or `folder` in it."""

    uri: str
    store: ObjectStore
    folder: Folder | None

    @staticmethod
    def at(uri: str, setting: str = _SETTING) -> CheckpointSource:
        """Parses `uri` without accessing it yet. `setting`: the field that names it.

        Raises:
            BadSpecError: it is neither an absolute path nor gs://bucket/path.
        """
        parent, _, last = uri.rstrip("/").rpartition("/")
        folder = Folder.parse(last)
        return CheckpointSource(uri, open_store(uri if folder is None else parent, setting), folder)


def choose_own(
    store: ObjectStore, author: Author, source: CheckpointSource | None, say: Say, warn: Say
) -> LoadedCheckpoint | None:
    """Returns the newest checkpoint in the job's own folder that it may continue unasked; None if there is none.

    `warn`: receives a message if the job does not continue from the newest checkpoint.

    Raises:
        CheckpointUnusableError: this very job has checkpoints there, and none can be continued.
        UserCodeError: an earlier job of this name left checkpoints of another recipe, and nothing says what to do.
        StorageError: the storage refuses.
    """
    criteria = SearchCriteria(lambda commit: author.may_continue(commit.author), lambda commit: _unfit(commit, author))
    result = search(store, criteria, lambda *checkpoint: _load(store, *checkpoint), say, expected=author.attempt > 1)
    by_this_job = [rejected for rejected in result.passed if _is_by(author, rejected)]
    ahead = [rejected for rejected in result.passed if rejected.commit is not None or rejected in by_this_job]
    if result.taken is not None:
        if ahead:
            warn(_describe_skipped(result.taken, ahead))
        return result.taken
    if by_this_job:
        is_damaged = by_this_job[0].commit is None or any(
            rejected.commit is not None and _unfit(rejected.commit, author) is None for rejected in by_this_job
        )
        raise (CheckpointUnusableError if is_damaged else OtherModelError)(_describe_unusable(store, by_this_job))
    if source is None:
        usable = [pair for pair in result.others if pair[0].author.fingerprint == author.fingerprint]
        _refuse_other_recipe(store, author, usable)
        for commit, entry in result.others:
            say(f"checkpoint {entry.folder} is passed over: it is of job {commit.author}")
    if ahead:
        warn(f"begins {'at step 0' if source is None else 'elsewhere'}: {'; '.join(map(str, ahead[:2]))}")
    elif source is None and (result.others or result.passed):
        warn(
            f"begins at step 0: {store.uri} holds checkpoints, but none that this job continues unasked; the log says "
            f"why, and {_SETTING} can name one"
        )
    elif source is None and any(_is_by(author, rejected) for rejected in result.unfinished):
        warn(f"begins at step 0: {store.uri} holds files of this job's, but no checkpoint that was ever complete")
    elif source is None and _are_above(store, author):
        warn(
            f"begins at step 0: there are checkpoints directly in {_above(store, author)}, where version 0.1.0 kept "
            f"them; {_SETTING} can name it"
        )
    return None


def choose_named(source: CheckpointSource, author: Author, say: Say, warn: Say) -> LoadedCheckpoint:
    """Returns the checkpoint that checkpoint.resumeFrom names. `warn`: as for `choose_own`.

    Raises:
        UserCodeError: there is none, or none that fits this job.
        StorageError: the storage refuses.
    """
    store = source.store
    criteria = SearchCriteria(unfit=lambda commit: _unfit(commit, author), folder=source.folder)
    result = search(store, criteria, lambda *checkpoint: _load(store, *checkpoint), say)
    if result.taken is not None:
        if result.passed:
            warn(f"{_SETTING}: {_describe_skipped(result.taken, result.passed)}")
        return result.taken
    if result.passed:
        raise UserCodeError(
            f"{_SETTING}: no checkpoint in {source.uri} fits this job: their model, entrypoint or seed differs, or "
            "their files are damaged; the log says which"
        )
    raise UserCodeError(
        f"{_SETTING}: there is no checkpoint in {source.uri}; name the folder of a job, which holds "
        "step-..., or one of these"
    )


def _unfit(commit: Commit, author: Author) -> str | None:
    return None if commit.author.fingerprint == author.fingerprint else "it is of another task, model or seed"


def _load(store: ObjectStore, folder: Folder, commit: Commit) -> LoadedCheckpoint:
    snapshot = parse_snapshot(commit.files, lambda file: read_checked(store, folder, commit, file))
    return LoadedCheckpoint(folder, commit, snapshot)


def _is_by(author: Author, rejected: RejectedCheckpoint) -> bool:
    return (
        rejected.entry.folder.job == author.job if rejected.commit is None else rejected.commit.author.uid == author.uid
    )


def _describe_skipped(taken: LoadedCheckpoint, ahead: Sequence[RejectedCheckpoint]) -> str:
    more = f"; and {len(ahead) - 1} more, see the log" if ahead[1:] else ""
    return f"continues from checkpoint {taken.folder}, which is not the newest: {ahead[0]}{more}"


def _describe_unusable(store: ObjectStore, rejected: Sequence[RejectedCheckpoint]) -> str:
    more = f"; and {len(rejected) - 1} more, see the log" if rejected[1:] else ""
    return (
        f"{store.uri}: this job has checkpoints and can continue none of them; it does not begin at step 0 by itself: "
        f"{rejected[0]}{more}. Restore the files, or run the image and the code that wrote them; to begin at step 0, "
        f"or where {_SETTING} says, delete the job and create it again"
    )


def _above(store: ObjectStore, author: Author) -> str:
    return store.uri.removesuffix(f"/{author.name}")


def _are_above(store: ObjectStore, author: Author) -> bool:
    above = _above(store, author)
    if above in (store.uri, ""):
        return False
    try:
        return bool(entries(open_store(above).list("step-")))
    except (StorageError, BadSpecError):
        # The hint is not worth an error.
        return False


def _refuse_other_recipe(store: ObjectStore, author: Author, usable: Sequence[Candidate]) -> None:
    for commit, entry in usable:
        if author.is_namesake(commit.author):
            raise UserCodeError(
                f"checkpoint.uri: checkpoint {entry.folder} is of an earlier job {author.name} with another recipe "
                f"({_compare(commit.author.recipe, author.recipe)}); to continue from it, set {_SETTING} to "
                f"{store.uri}; to begin at step 0, choose another checkpoint.uri or another name for the job"
            )


def _compare(there: Mapping[str, str], here: Mapping[str, str]) -> str:
    names = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
    shown = [f"{name} {there.get(name, 'not set')} there, {here.get(name, 'not set')} here" for name in names]
    more = len(shown) - _MOST_DIFFERENCES
    return "; ".join([*shown[:_MOST_DIFFERENCES], *([f"and {more} more"] if more > 0 else [])])
