"""What can go wrong: one class for each kind of failure, that is, for each who can act on it."""

from __future__ import annotations


class FletchError(Exception):
    """A call failed.

    Attributes:
        code: the server's stable word for it (``"not_found"``, ``"origin_changed"``, ...; all of them are
            in the OpenAPI document); ``""`` where no server spoke.
        hint: what a person can do about it; may be ``""``.
        retryable: whether the same call may succeed later without anyone changing anything. Calls
            have already tried again until their timeout when they raise.
    """

    code: str
    hint: str
    retryable: bool

    def __init__(self, message: str, code: str = "", hint: str = "", retryable: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint
        self.retryable = retryable


class NotFound(FletchError, LookupError):
    """It does not exist, or not for this principal."""


class Invalid(FletchError, ValueError):
    """It was asked for something that cannot be: a bad name, a bad setting, a token that is missing."""


class Corrupt(FletchError):
    """Bytes or tables are not what the version says; an object changed after it was indexed."""


class Unavailable(FletchError):
    """The server or its origin did not answer in time; asking again may help."""


class Overloaded(FletchError):
    """A limit was reached and stayed reached until the timeout; wait and ask again."""


class Internal(FletchError):
    """A defect of Fletch."""
