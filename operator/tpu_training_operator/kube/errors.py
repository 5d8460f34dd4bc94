"""The errors of a cluster. The client and the local store raise the same ones, by the API server's HTTP status."""

from tpu_training_operator.api.text import plain

_LONGEST_QUOTE = 1000


class ApiError(Exception):
    """The cluster refused a request or could not be reached.

    `status`: the HTTP status; 0 without an answer. `retry_after`: the seconds that the server asks to wait before the
    next request; 0 if it does not.
    """

    def __init__(self, status: int, reason: str, message: str, *, retry_after: float = 0.0) -> None:
        super().__init__(message or reason or f"HTTP {status}")
        self.status = status
        self.reason = reason
        self.retry_after = retry_after


class NotFound(ApiError):
    """404."""


class AlreadyExists(ApiError):
    """409 on create: the name is taken."""


class Conflict(ApiError):
    """409: the object changed since it was read (resourceVersion or uid)."""


class Forbidden(ApiError):
    """403: a right is missing, a quota is used up, or Pod Security refuses the object."""


class InvalidRequest(ApiError):
    """422, 413 or 400: the object itself is wrong, so a retry would fail in the same way."""


class Unavailable(ApiError):
    """Overload, a server error, or no answer at all: a retry may succeed."""


class Expired(Unavailable):
    """410: the version or the page to continue from is too old, so a new list is necessary."""


class TooLarge(Unavailable):
    """The answer is longer than the client reads."""


class Silence(Unavailable):
    """An open stream was silent for a while. The other end may have nothing to send, or may be gone."""


_BY_STATUS: dict[int, type[ApiError]] = {
    400: InvalidRequest,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Expired,
    # The object is larger than etcd accepts.
    413: InvalidRequest,
    422: InvalidRequest,
}


def error_of(
    status: int, reason: object, message: object, *, method: str = "GET", retry_after: float = 0.0
) -> ApiError:
    """Returns the error for an HTTP status, with the server's reason and message made safe for a terminal."""
    kind = _BY_STATUS.get(status, Unavailable)
    if kind is Conflict and method == "POST" and reason == "AlreadyExists":
        kind = AlreadyExists
    return kind(status, plain(str(reason or "")), plain(str(message or "")), retry_after=retry_after)


def quote(body: bytes | bytearray) -> str:
    """Returns the beginning of an unexpected answer, for an error message."""
    return plain(body[:_LONGEST_QUOTE].decode(errors="replace")).strip()
