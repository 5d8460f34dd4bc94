"""An image of a release, built by a real builder: its archive tells the digest that a registry will know it by."""

import hashlib
import tarfile
from pathlib import Path

import pytest

from release.images import builder, digest_of
from release.source import Source


def test_the_digest_is_known_before_the_push(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In a storage of its own, which ends with the test.
    storage = f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/root"\nrunroot = "{tmp_path}/run"\n'
    (tmp_path / "storage.conf").write_text(storage)
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(tmp_path / "storage.conf"))
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "Dockerfile").write_text("FROM scratch\nARG NOTE\nLABEL note=$NOTE\nCOPY Dockerfile /\nUSER 65532:65532\n")
    source = Source(tree, "1", "1", "0" * 40, 1767225600, changed=False)
    archives = [tmp_path / "first.tar", tmp_path / "second.tar"]

    build = builder("buildah", ("--build-arg=NOTE=hello",))
    for archive in archives:
        build(source, Path("Dockerfile"), "registry.example/team/x:1", archive)

    digest = digest_of(archives[0])
    with tarfile.open(archives[0]) as tar:
        manifest = tar.extractfile(f"blobs/sha256/{digest.removeprefix('sha256:')}")
        assert f"sha256:{hashlib.sha256(manifest.read()).hexdigest()}" == digest
    assert digest_of(archives[1]) == digest
