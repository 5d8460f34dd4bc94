"""The licence that a package declares, as CycloneDX wants it: an SPDX identifier or expression, else the words it uses.

Newer packages declare an SPDX expression. Older ones have a field of free text, or a classifier.
"""

from email.message import Message
from importlib.metadata import PackageMetadata
from typing import Any

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

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
    text = (metadata["License"] or "").strip()
    try:
        expression = canonicalize_license_expression(
            metadata["License-Expression"] or _FREE_TEXT.get(text.lower(), text)
        )
        is_identifier = " " not in expression and not expression.startswith("LicenseRef-")
        return {"license": {"id": expression}} if is_identifier else {"expression": expression}
    except InvalidLicenseExpression:
        classifiers = [value.split(" :: ")[-1] for value in metadata.get_all("Classifier", ()) if "License ::" in value]
    named = [name for name in classifiers if name != "OSI Approved"]
    if len(named) == 1 and named[0] in _CLASSIFIERS:
        return {"license": {"id": _CLASSIFIERS[named[0]]}}
    short = text if text and len(text) <= _LONGEST_NAME and "\n" not in text else "not declared"
    return {"license": {"name": ", ".join(named) or short}}
