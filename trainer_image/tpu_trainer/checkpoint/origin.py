"""Where a job's training starts: at a checkpoint of its own, at one that it was told to continue, or at step 0.

A job that continued somebody else's finished training would succeed without training anything. So a job continues
unasked only what it wrote itself, or what a job of the same name and recipe wrote before it was deleted and created
again. Everything else must be named in checkpoint.resumeFrom.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpu_trainer.checkpoint.catalogue import Candidate, Found, Say, candidates, entries, newest
from tpu_trainer.checkpoint.commit import Author, Folder
from tpu_trainer.checkpoint.store import Store, open_store
from tpu_trainer.errors import BadSpecError, StorageError, UserCodeError

_SETTING = "checkpoint.resumeFrom"
_MOST_DIFFERENCES = 4


@dataclass(frozen=True)
class Elsewhere:
    """What checkpoint.resumeFrom or checkpoint.initFrom names: the newest checkpoint of `store`, or `folder` in it."""

    uri: str
    store: Store
    folder: Folder | None

    @staticmethod
    def at(uri: str, setting: str = _SETTING) -> Elsewhere:
        """Without any access to it yet. `setting`: the field that names it.

        Raises:
            BadSpecError: it is not a place for checkpoints.
        """
        parent, _, last = uri.rstrip("/").rpartition("/")
        folder = Folder.parse(last)
        return Elsewhere(uri, open_store(uri if folder is None else parent, setting), folder)


def choose_own(store: Store, author: Author, elsewhere: Elsewhere | None, say: Say, warn: Say) -> Found | None:
    """The newest checkpoint in the job's own folder that it may continue unasked; None if there is none.

    `warn`: takes what matters to someone who expected the job to continue.

    Raises:
        UserCodeError: an earlier job of this name left checkpoints of another recipe, and nothing says what to do.
        StorageError: the storage refuses.
    """
    held = candidates(store, say)
    found = newest(store, (one for one in held if author.may_continue(one[0].author)), author.fingerprint, say)
    if found is not None or elsewhere is not None:
        return found
    others = [one for one in held if not author.may_continue(one[0].author)]
    usable = [one for one in others if one[0].author.fingerprint == author.fingerprint]
    _refuse_other_recipe(store, author, usable)
    for commit, entry in others:
        say(f"checkpoint {entry.folder} is passed over: it is of job {commit.author}")
    if held:
        warn(
            f"begins at step 0: {store.uri} holds checkpoints, but none that this job continues unasked; the log says "
            f"why, and {_SETTING} can name one"
        )
    elif _lie_above(store, author):
        warn(
            f"begins at step 0: there are checkpoints directly in {_above(store, author)}, where version 0.1.0 kept "
            f"them; {_SETTING} can name it"
        )
    return None


def choose_elsewhere(elsewhere: Elsewhere, author: Author, say: Say) -> Found:
    """The checkpoint that checkpoint.resumeFrom names.

    Raises:
        UserCodeError: there is none, or none that fits this job.
        StorageError: the storage refuses.
    """
    lines: list[str] = []
    held = candidates(elsewhere.store, lines.append)
    named = [one for one in held if elsewhere.folder in (None, one[1].folder)]
    found = newest(elsewhere.store, named, author.fingerprint, lines.append)
    if found is not None:
        return found
    for line in lines:
        say(line)
    if named:
        raise UserCodeError(
            f"{_SETTING}: no checkpoint in {elsewhere.uri} fits this job: their model, entrypoint or seed differs, or "
            "their files are damaged; the log says which"
        )
    raise UserCodeError(
        f"{_SETTING}: there is no checkpoint in {elsewhere.uri}; name the folder of a job, which holds "
        "step-..., or one of these"
    )


def _above(store: Store, author: Author) -> str:
    return store.uri.removesuffix(f"/{author.name}")


def _lie_above(store: Store, author: Author) -> bool:
    above = _above(store, author)
    if above in (store.uri, ""):
        return False
    try:
        return bool(entries(open_store(above)))
    except (StorageError, BadSpecError):
        # It is only a hint.
        return False


def _refuse_other_recipe(store: Store, author: Author, usable: Sequence[Candidate]) -> None:
    for commit, entry in usable:
        if author.is_namesake(commit.author):
            raise UserCodeError(
                f"checkpoint.uri: checkpoint {entry.folder} is of an earlier job {author.name} with another recipe "
                f"({_differences(commit.author.recipe, author.recipe)}); to continue from it, set {_SETTING} to "
                f"{store.uri}; to begin at step 0, choose another checkpoint.uri or another name for the job"
            )


def _differences(there: Mapping[str, str], here: Mapping[str, str]) -> str:
    names = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
    shown = [f"{name} {there.get(name, 'not set')} there, {here.get(name, 'not set')} here" for name in names]
    more = len(shown) - _MOST_DIFFERENCES
    return "; ".join([*shown[:_MOST_DIFFERENCES], *([f"and {more} more"] if more > 0 else [])])
