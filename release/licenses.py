"""The licence that a package declares, as CycloneDX wants it: an SPDX identifier or expression, else the words it uses.

Newer packages declare an SPDX expression. Older ones have a field of free text, or a classifier.
"""

from email.message import Message
from importlib.metadata import PackageMetadata
from typing import Any

# The identifiers that stand alone in this project's packages.
_IDENTIFIERS = ("0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT", "MIT-0", "MPL-2.0", "PSF-2.0")
_FREE_TEXT = {"3-clause bsd license": "BSD-3-Clause", "apache 2.0 license": "Apache-2.0", "apache 2.0": "Apache-2.0"}
# "BSD License" and the like leave the version open, so they stay words.
_CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
# A field of text that is longer than this holds the licence itself.
_LONGEST_NAME = 60


def license_of(metadata: PackageMetadata | Message) -> dict[str, Any]:
    """Returns one entry of a component's `licenses`."""
    expression = metadata["License-Expression"]
    if expression:
        return {"license": {"id": expression}} if expression in _IDENTIFIERS else {"expression": expression}
    text = (metadata["License"] or "").strip()
    known = {identifier.lower(): identifier for identifier in _IDENTIFIERS} | _FREE_TEXT
    if text.lower() in known:
        return {"license": {"id": known[text.lower()]}}
    classifiers = [value.split(" :: ")[-1] for value in metadata.get_all("Classifier") or [] if "License ::" in value]
    named = [name for name in classifiers if name != "OSI Approved"]
    if len(named) == 1:
        identifier = _CLASSIFIERS.get(named[0])
        return {"license": {"id": identifier} if identifier else {"name": named[0]}}
    if named:
        return {"license": {"name": ", ".join(named)}}
    short = text if text and len(text) <= _LONGEST_NAME and "\n" not in text else "not declared"
    return {"license": {"name": short}}
