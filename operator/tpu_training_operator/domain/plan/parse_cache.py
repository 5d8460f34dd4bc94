"""Specs and statuses, parsed or remembered.

In most passes a job has the same spec and status as in the last one, and parsing them takes longer than planning. They
are remembered by their JSON, so a change is always parsed, and nothing can be out of date.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import orjson

from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.status import RungStatus, Status
from tpu_training_operator.api.validation import InvalidJob, parse_job
from tpu_training_operator.domain.job.options import SliceOption, options_of
from tpu_training_operator.domain.job.rungs import lower_rungs_of, noise_of_rungs, with_noise_scale

# The metadata that parsing reads; the rest changes without changing the job.
_METADATA = ("name", "namespace", "uid", "generation", "creationTimestamp")
# A small job takes 20 KiB of memory once parsed. Users choose how large a job is and how many there are, so both are
# bounded.
_MOST = 256
_LONGEST = 8 * 2**10

Parsed = tuple[tuple[SliceOption, ...], tuple[SliceOption, ...]]


def read_status(body: Any) -> Status:
    """Returns the status in `body`, which may be None."""
    text = _as_text(body)
    return Status.read(body) if text is None else _read_status(text)


def read_job(body: Mapping[str, Any], rungs: Sequence[RungStatus] = ()) -> Parsed:
    """Returns the parsed job once for each slice that it may run on, and once for each rung below the job itself.
    `rungs`: as in its status; the job takes the noise scale that they have measured, unless it has one of its own or
    cannot be resolved with theirs. Raises InvalidJob."""
    noise = noise_of_rungs(rungs)
    measured = with_noise_scale(body, noise) if noise else None
    if noise is None or measured is None:
        return _read(body)
    try:
        options, lower_rungs = _read(measured)
    except InvalidJob:
        return _read(body)
    return _with_note(options, noise.note), _with_note(lower_rungs, noise.note)


def _with_note(options: Sequence[SliceOption], note: str) -> tuple[SliceOption, ...]:
    return tuple(replace(option, resolution=replace(option.resolution, noise_note=note)) for option in options)


def _read(body: Mapping[str, Any]) -> Parsed:
    metadata = {name: body["metadata"][name] for name in _METADATA if name in body["metadata"]}
    selected = {name: value for name, value in body.items() if name != "status"} | {"metadata": metadata}
    text = _as_text(selected)
    return _parse(selected) if text is None else _read_job(text)


def without_entry_check(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the job without spec.entryCheck: a later change of it must not stop an attempt that has begun."""
    spec = job.get("spec")
    if not isinstance(spec, Mapping) or "entryCheck" not in spec:
        return job
    return {**job, "spec": {name: value for name, value in spec.items() if name != "entryCheck"}}


@lru_cache(_MOST)
def _read_status(text: bytes) -> Status:
    return Status.read(orjson.loads(text))


@lru_cache(_MOST)
def _read_job(text: bytes) -> Parsed:
    return _parse(orjson.loads(text))


def _parse(body: Mapping[str, Any]) -> Parsed:
    job = parse_job(body)
    return options_of(job), lower_rungs_of(job)


def _as_text(value: Any) -> bytes | None:
    """Returns the value as JSON; None if it is too long to keep, or not plain JSON."""
    try:
        # Unsorted, so that what is parsed has the order in which it is shown.
        text = orjson.dumps(value)
    except TypeError:
        return None
    return text if len(text) <= _LONGEST else None
