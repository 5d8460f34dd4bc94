"""One request to the progress service. Used by the heartbeat's thread only.

Token and certificate are files that are replaced while the run goes on: the token is read for every report, the
certificate for every connection.
"""

from __future__ import annotations

import json
import ssl
from http.client import HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit

from tpu_trainer.environment import ProgressService

_ANSWER_LIMIT = 64 * 1024


class RefusedError(Exception):
    """The service answered, but did not take the report. `retry_after`: seconds, where it named them."""

    def __init__(self, message: str, retry_after: int | None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Endpoint:
    """Keeps its connection between requests for as long as the service does."""

    def __init__(self, service: ProgressService) -> None:
        self._service = service
        self._kept: HTTPSConnection | None = None

    def post(self, body: bytes, seconds: float) -> object:
        """The answer's JSON; None where it is none. `seconds`: how long the service may be silent.

        Raises:
            RefusedError: the answer is no success.
            Exception: whatever else can go wrong with a file, a name, a connection or a certificate.
        """
        kept, self._kept = self._kept, None
        if kept is not None:
            try:
                return self._exchange(kept, body, seconds)
            except TimeoutError:
                raise
            except OSError:
                # Closed by the service since the last report, which shows only now; a report may come twice.
                pass
        return self._exchange(self._connection(), body, seconds)

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()

    def _connection(self) -> HTTPSConnection:
        where = urlsplit(self._service.url)
        if where.hostname is None:
            raise ValueError(f"{self._service.url} is no URL")
        # TLS whatever the URL's scheme is: the token must not be read by others.
        context = ssl.create_default_context(cafile=self._service.ca_file)
        return HTTPSConnection(where.hostname, where.port, context=context)

    def _exchange(self, connection: HTTPSConnection, body: bytes, seconds: float) -> object:
        token = self._service.token_file.read_text(encoding="ascii").strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        try:
            connection.timeout = seconds
            if connection.sock is not None:
                connection.sock.settimeout(seconds)
            connection.request("POST", urlsplit(self._service.url).path, body, headers)
            response = connection.getresponse()
            answer = response.read(_ANSWER_LIMIT)
        except Exception:
            connection.close()
            raise
        if connection.sock is not None and response.isclosed():
            self._kept = connection
        else:
            # The service wants no more on it, or has said more than was read.
            connection.close()
        return _understood(response, answer)


def _understood(response: HTTPResponse, answer: bytes) -> object:
    try:
        document = json.loads(answer)
    except ValueError:
        document = None
    if response.status // 100 == 2:
        return document
    message = document.get("message") if isinstance(document, dict) else None
    seconds = response.headers.get("Retry-After", "")
    raise RefusedError(f"{response.status} {message or response.reason}", int(seconds) if seconds.isdecimal() else None)
