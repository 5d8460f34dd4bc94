"""A few raw calls to an API server over HTTPS, for the test cluster's own needs.

For calls that are polled or repeated, where kubectl would cost a process each time. The product's client is not
used: a test cluster must not depend on the code under test.
"""

import http.client
import json
import select
import socket
import ssl
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.cluster.deadlines import deadline

TIMEOUT_SECONDS = 30.0

JSON = "application/json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"
MERGE_PATCH = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"

Object = dict[str, Any]


class ApiError(Exception):
    """The API server refused; `status` is the HTTP status, the message is the server's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


@dataclass(frozen=True)
class Identity:
    """The user that a call impersonates (the admin may impersonate anyone)."""

    user: str
    group: str

    @classmethod
    def kubelet(cls, node: str) -> "Identity":
        """The identity that the node authorizer and NodeRestriction accept as the kubelet of `node`."""
        return cls(f"system:node:{node}", "system:nodes")


class ApiClient:
    """Calls with bearer token `token`, from any thread.

    Connections are kept, because a new one costs client and server four milliseconds of CPU time and the call itself
    one; a test that waits calls many times. One that the server has closed since, by a restart, is dropped.
    """

    def __init__(self, server: str, ca_file: Path, token: str) -> None:
        self._address = urlsplit(server).netloc
        self._tls = ssl.create_default_context(cafile=str(ca_file))
        self._headers = {"Authorization": f"Bearer {token}"}
        self._idle: list[http.client.HTTPSConnection] = []

    def close(self) -> None:
        """Closes the connections that are kept; a later call opens another."""
        while self._idle:
            self._idle.pop().close()

    def call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        content_type: str = JSON,
        identity: Identity | None = None,
    ) -> Object:
        """The decoded answer. Raises ApiError, and OSError when the server cannot be reached."""
        headers = self._headers | {"Content-Type": content_type}
        if identity is not None:
            headers |= {"Impersonate-User": identity.user, "Impersonate-Group": identity.group}
        with self._kept() as connection:
            return _exchange(connection, method, path, body, headers)

    @contextmanager
    def watch(self, path: str) -> Iterator[Iterator[Object]]:
        """The watch events of a collection, beginning with one for each existing object. Raises ApiError.

        Leaving the block ends the iteration in the thread that reads; some thread must be reading.
        """
        connection = self._connect(waits=True)
        try:
            connection.request("GET", f"{path}?watch=1", headers=self._headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise ApiError(response.status, _server_message(response.read().decode()))
        except BaseException:
            connection.close()
            raise
        try:
            yield _lines(connection, response)
        finally:
            # Not closed here: the thread that iterates may be in the middle of reading.
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def create_all(self, path: str, objects: Iterable[Object]) -> None:
        """POSTs the objects one after another over one connection. Raises ApiError at the first refusal."""
        headers = self._headers | {"Content-Type": JSON}
        with self._kept() as connection:
            for item in objects:
                _exchange(connection, "POST", path, item, headers)

    @contextmanager
    def _kept(self) -> Iterator[http.client.HTTPSConnection]:
        """A connection for one thread at a time."""
        connection = self._idle_one() or self._connect()
        try:
            yield connection
        except ApiError:
            # The answer has been read to its end.
            self._idle.append(connection)
            raise
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)

    def _idle_one(self) -> http.client.HTTPSConnection | None:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            # Nothing is to be read from it before the next request, unless the server has closed it.
            if connection.sock is not None and not select.select([connection.sock], [], [], 0)[0]:
                return connection
            connection.close()
        return None

    def _connect(self, *, waits: bool = False) -> http.client.HTTPSConnection:
        """`waits`: without a limit for the answer."""
        timeout = None if waits else deadline(TIMEOUT_SECONDS)
        return http.client.HTTPSConnection(self._address, context=self._tls, timeout=timeout)


def answers_ok(url: str, ca_file: Path | None = None) -> bool:
    """Whether a GET of an http or https URL answers 200; False while nothing listens. `ca_file` for https."""
    parts = urlsplit(url)
    connection: http.client.HTTPConnection
    if ca_file is None:
        connection = http.client.HTTPConnection(parts.netloc, timeout=deadline(TIMEOUT_SECONDS))
    else:
        tls = ssl.create_default_context(cafile=str(ca_file))
        connection = http.client.HTTPSConnection(parts.netloc, context=tls, timeout=deadline(TIMEOUT_SECONDS))
    try:
        connection.request("GET", parts.path)
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _exchange(
    connection: http.client.HTTPSConnection,
    method: str,
    path: str,
    body: Object | None,
    headers: dict[str, str],
) -> Object:
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    response = connection.getresponse()
    text = response.read().decode()
    if response.status >= http.client.BAD_REQUEST:
        raise ApiError(response.status, _server_message(text))
    answer: Object = json.loads(text)
    return answer


def _lines(connection: http.client.HTTPSConnection, response: http.client.HTTPResponse) -> Iterator[Object]:
    """One JSON object a line, until either side ends the connection, which is then closed."""
    with closing(connection), suppress(OSError, http.client.HTTPException, ValueError):
        for line in response:
            yield json.loads(line)


def _server_message(text: str) -> str:
    """The message of a `Status` object, or the text itself where the server answered in plain words."""
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text.strip()
