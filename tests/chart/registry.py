"""A registry that serves one OCI layout and takes nothing, because helm reads charts from registries only.

https://github.com/opencontainers/distribution-spec/blob/v1.1.0/spec.md
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.cluster.ports import LOOPBACK


@contextmanager
def serving(layout: Path, name: str) -> Iterator[str]:
    """The layout's artifacts under this name; yields the reference without tag, for plain HTTP."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, media_type, body = answer(layout, self.path.removeprefix(f"/v2/{name}/"))
            self.send_response(status)
            self.send_header("Content-Type", media_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 - the base class's name

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            pass

    server = ThreadingHTTPServer((LOOPBACK, 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"oci://{LOOPBACK}:{server.server_port}/{name}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def answer(layout: Path, path: str) -> tuple[int, str, bytes]:
    """Status, media type and body."""
    kind, _, reference = path.partition("/")
    tags = {one["annotations"]["org.opencontainers.image.ref.name"]: one for one in _index(layout)}
    if path == "tags/list":
        return 200, "application/json", json.dumps({"tags": list(tags)}).encode()
    by_digest = {one["digest"]: one for one in tags.values()}
    manifest = tags.get(reference) or by_digest.get(reference)
    if kind == "manifests" and manifest:
        return 200, manifest["mediaType"], _blob(layout, manifest["digest"]).read_bytes()
    if kind == "blobs" and _blob(layout, reference).is_file():
        return 200, "application/octet-stream", _blob(layout, reference).read_bytes()
    return 404, "application/json", b'{"errors": [{"code": "NAME_UNKNOWN"}]}'


def _index(layout: Path) -> list[Any]:
    return list(json.loads((layout / "index.json").read_text())["manifests"])


def _blob(layout: Path, digest: str) -> Path:
    return layout / "blobs" / "sha256" / digest.removeprefix("sha256:")
