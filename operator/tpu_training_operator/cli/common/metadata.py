"""What the API server itself would refuse in a file's metadata. The operator only sees what it has taken."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tpu_training_operator.api.validation import Problem

_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_OF_LABELS = "at most 63 letters, digits, '-', '_' and '.', with a letter or a digit at both ends"


def metadata_problems(metadata: Mapping[str, Any]) -> Iterator[Problem]:
    namespace = metadata.get("namespace")
    if namespace is not None and not (isinstance(namespace, str) and _NAMESPACE.fullmatch(namespace)):
        yield Problem("metadata.namespace", f"{namespace!r} is not a name of at most 63 characters of a-z, 0-9 and '-'")
    for field in ("labels", "annotations"):
        given, path = metadata.get(field), f"metadata.{field}"
        if given is not None and not isinstance(given, Mapping):
            yield Problem(path, "must be a mapping of names to strings")
            continue
        for key, value in (given or {}).items():
            if not isinstance(key, str) or not _KEY.fullmatch(key):
                yield Problem(path, f"{key!r} is not a name such as team or example.com/team: {_OF_LABELS}")
            elif not isinstance(value, str):
                yield Problem(f"{path}.{key}", f"{value!r} is not a string; put it into quotes")
            elif field == "labels" and not _LABEL.fullmatch(value):
                yield Problem(f"{path}.{key}", f"{value!r} is not the value of a label: {_OF_LABELS}")
