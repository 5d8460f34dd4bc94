"""Every file of a release, in one folder, with checksums and with what it was made from."""

import hashlib
import json
import tempfile
from pathlib import Path

from release import chart, layout, sbom, source, wheel
from release.images import Build, Image, build_all, checked_registry

SUMS, ABOUT = "SHA256SUMS", "release.json"
_DEFINITION = Path("crds") / "tputrainingjobs.yaml"


def make(repository: Path, into: Path, registry: str, build: Build | None, *, allow_changes: bool = False) -> None:
    """Replaces the folder `into` by a release. build: None for one without images. Raises ReleaseError.

    Everything is made beside it first: a folder with this name is always a whole release.
    """
    checked_registry(registry)
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into.parent, prefix=f"{into.name}.unfinished-") as scratch:
        tree, made = Path(scratch) / "tree", Path(scratch) / "made"
        made.mkdir()
        made.chmod(0o755)
        _write(source.copy(repository, tree, allow_changes=allow_changes), registry, build, made)
        if into.exists():
            into.rename(Path(scratch) / "last")
        made.rename(into)


def _write(origin: source.Source, registry: str, build: Build | None, made: Path) -> None:
    images = build_all(origin, registry, build, made / "images") if build else {}
    archive = chart.write(origin, registry, images, made)
    chart_digest = layout.write(archive, origin.epoch, made / "chart-oci")
    (made / _DEFINITION.name).write_text(origin.read(_DEFINITION), encoding="utf-8")
    (made / f"{source.CHART.name}-{origin.tag}.cdx.json").write_text(sbom.document(origin), encoding="utf-8")
    wheel.build(origin, made)
    about = _about(origin, registry, images, chart_digest)
    (made / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    (made / SUMS).write_text(_sums(made), encoding="utf-8")


def _about(origin: source.Source, registry: str, images: dict[str, Image], chart_digest: str) -> dict[str, object]:
    return {
        "version": origin.version,
        "tag": origin.tag,
        "commit": origin.commit,
        "changedSinceCommit": origin.changed,
        "sourceDateEpoch": origin.epoch,
        "registry": registry,
        "chart": {"digest": chart_digest},
        "images": {name: image.pinned for name, image in images.items()},
        "leftOut": [] if images else ["images: the chart names a tag, and no digest"],
    }


def _sums(folder: Path) -> str:
    """Returns the lines that `sha256sum --check` reads."""
    lines = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.relative_to(folder)}\n")
    return "".join(lines)
