"""The chart as an archive that names the registry and the digests of this release.

helm writes such archives too, but with the times of the files in them: two releases of one commit would differ.
"""

import gzip
import io
import json
import re
import runpy
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from release.errors import ReleaseError
from release.images import OPERATOR, Image
from release.source import CHART, Source

_IGNORED = ".helmignore"


def write(source: Source, registry: str, images: Mapping[str, Image], into: Path) -> Path:
    """Returns the archive's path. images: if empty, the chart names the tag. Raises ReleaseError."""
    files = {str(path): (source.tree / CHART / path).read_bytes() for path in source.tracked(CHART)}
    files.pop(_IGNORED, None)
    values = _with_image(files["values.yaml"].decode(), registry, images)
    files["values.yaml"] = values.encode()
    files["Chart.yaml"] += _annotations(images).encode()
    files["README.md"] = _readme(source, values).encode()
    archive = into / f"{CHART.name}-{source.tag}.tgz"
    archive.write_bytes(_pack(files, source.epoch))
    return archive


def metadata(archive: Path) -> dict[str, Any]:
    """The chart's own Chart.yaml."""
    with tarfile.open(archive) as tar:
        file = tar.extractfile(f"{CHART.name}/Chart.yaml")
        assert file is not None
        return dict(yaml.safe_load(file))


def _with_image(values: str, registry: str, images: Mapping[str, Image]) -> str:
    values = _replace(values, "repository: localhost/tpu-training-operator", f"repository: {registry}/{OPERATOR}")
    if OPERATOR in images:
        values = _replace(values, 'digest: ""', f"digest: {images[OPERATOR].digest}")
    return values


def _replace(text: str, old: str, new: str) -> str:
    """Replaces text rather than parsed YAML, so that the comments stay."""
    changed, count = re.subn(rf"^(\s*){re.escape(old)}$", lambda found: found[1] + new, text, flags=re.MULTILINE)
    if count != 1:
        raise ReleaseError(f"{CHART}/values.yaml: {old!r} is there {count} times, where once is expected")
    return changed


def _annotations(images: Mapping[str, Image]) -> str:
    """Lists both images by digest, where catalogues of charts and mirroring tools look for them."""
    if not images:
        return ""
    listed = [{"name": name, "image": image.pinned} for name, image in sorted(images.items())]
    text = yaml.safe_dump(listed, sort_keys=False, width=1000)
    return yaml.safe_dump({"annotations": {"artifacthub.io/images": text}}, default_style=None)


def _readme(source: Source, values: str) -> str:
    """Returns the chart's README with the defaults of this archive."""
    page = runpy.run_path(str(source.tree / "scripts" / "chart_readme.py"))["page"]
    return str(page(json.loads(source.read(CHART / "values.schema.json")), yaml.safe_load(values)))


def _pack(files: Mapping[str, bytes], epoch: int) -> bytes:
    """Packs Chart.yaml first, as helm does, and the rest sorted; without owners, and with one mode."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", filename="", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for name in sorted(files, key=lambda name: (name != "Chart.yaml", name)):
            entry = tarfile.TarInfo(f"{CHART.name}/{name}")
            entry.size, entry.mtime, entry.mode = len(files[name]), epoch, 0o644
            tar.addfile(entry, io.BytesIO(files[name]))
    return packed.getvalue()
