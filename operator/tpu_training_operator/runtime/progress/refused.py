"""How the progress service says no. Raised anywhere in this package, turned into an answer by `server`."""


class Refused(Exception):
    """`status` is HTTP's, the message is for the person who reads the worker's log. `retry_after`: in seconds, for
    what may go well later."""

    def __init__(self, status: int, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
