"""How the progress service says no: raised anywhere in this package, turned into an answer by `server`."""


class Refused(Exception):
    """`status` is the HTTP status; the message is for the reader of the worker's log. `retry_after`: seconds, if the
    same report may succeed later."""

    def __init__(self, status: int, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class NoAnswer(Exception):
    """The API server could not say whose token it is; the message says why. No stranger can cause this."""
