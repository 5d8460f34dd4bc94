"""`python -m release`, which `make dist` calls."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from release.distribution import ABOUT, SUMS, make
from release.errors import ReleaseError
from release.images import builder

_REPOSITORY = Path(__file__).parents[1]


def _tell(folder: Path) -> None:
    for line in (folder / SUMS).read_text(encoding="utf-8").splitlines():
        print(line[:12], line[66:])
    about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    for left_out in about["leftOut"]:
        print(f"left out: {left_out}", file=sys.stderr)
    if about["changedSinceCommit"]:
        print(f"not a release: made from changes to {about['commit'][:12]}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m release", description="The files of a release, in one folder (docs/releasing.md)."
    )
    parser.add_argument("--registry", required=True, help="where the images will be, such as registry.example/team")
    parser.add_argument("--without-images", action="store_true", help="name a tag in the chart, and no digest")
    parser.add_argument("--builder", default="", help="docker, podman or buildah; the first that answers by default")
    parser.add_argument("--build-flags", default="", help="more arguments for the builder")
    parser.add_argument("--allow-changes", action="store_true", help="from a working tree that is not a commit")
    parser.add_argument("--into", type=Path, default=_REPOSITORY / "dist")
    asked = parser.parse_args(arguments)
    try:
        build = builder(asked.builder, tuple(asked.build_flags.split())) if not asked.without_images else None
        make(_REPOSITORY, asked.into.absolute(), asked.registry, build, allow_changes=asked.allow_changes)
    except (ReleaseError, OSError) as error:
        print(f"make dist: {error}", file=sys.stderr)
        return 1
    _tell(asked.into)
    return 0


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
