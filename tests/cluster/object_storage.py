"""A server with the interface of Google Cloud Storage: a process on this machine that keeps objects in memory.

Clients find it through STORAGE_EMULATOR_HOST, see `ObjectStorage.environment`.
"""

import json
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Self

from tests.cluster import binaries
from tests.cluster.api import answers_ok
from tests.cluster.ports import LOOPBACK, free_port
from tests.cluster.processes import Children

START_SECONDS = 60.0
STOP_GRACE_SECONDS = 5.0


class ObjectStorage:
    """A context: the server runs inside it. `directory` gets its log and its pid file.

    address: the address of this machine where it listens; pods of a RealCluster reach the cluster's `address`.
    location: where all its buckets say they are.
    """

    def __init__(self, directory: Path, address: str = LOOPBACK, location: str = "US-CENTRAL1") -> None:
        self._directory = directory
        self._address = address
        self._location = location
        self._children = Children(directory, {})
        self.url: str

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that make a process use this server instead of Google's."""
        return {"STORAGE_EMULATOR_HOST": self.url}

    def __enter__(self) -> Self:
        """Raises ToolchainMissing, BuildError, ProcessError."""
        program = binaries.ensure("fake-gcs-server")["fake-gcs-server"]
        address = f"{self._address}:{(port := free_port())}"
        self.url = f"http://{address}"
        child = self._children.start(
            "fake-gcs-server",
            program,
            "-backend=memory",
            "-scheme=http",
            f"-location={self._location}",
            f"-host={self._address}",
            f"-port={port}",
            # Otherwise uploads of several requests would continue at Google's server.
            f"-external-url={self.url}",
            f"-public-host={address}",
            "-log-level=warn",
        )
        try:
            child.wait_ready(lambda: answers_ok(f"{self.url}/storage/v1/b"), timeout=START_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._children.stop_all(grace=STOP_GRACE_SECONDS)

    def make_bucket(self, name: str) -> None:
        body = json.dumps({"name": name}).encode()
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}/storage/v1/b", body, headers)) as answer:
            assert answer.status == 200

    def read(self, bucket: str, name: str) -> bytes:
        path = urllib.parse.quote(name, safe="")
        with urllib.request.urlopen(f"{self.url}/storage/v1/b/{bucket}/o/{path}?alt=media") as answer:
            content: bytes = answer.read()
        return content

    def names(self, bucket: str, prefix: str = "") -> list[str]:
        """The names of the bucket's objects that begin with `prefix`, at most a thousand."""
        query = urllib.parse.urlencode({"prefix": prefix})
        with urllib.request.urlopen(f"{self.url}/storage/v1/b/{bucket}/o?{query}") as answer:
            return [item["name"] for item in json.load(answer).get("items", [])]
