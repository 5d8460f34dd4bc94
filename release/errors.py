"""What a person who makes a release can put right."""


class ReleaseError(Exception):
    """The message says what was wrong, where, and what would be right."""
