"""The exceptions of Fletch: one class for each kind of failure, which says who can act on it."""

from __future__ import annotations

import sys


class FletchError(Exception):
    """A call failed.

    Attributes:
        code: the server's stable error code (``"not_found"``, ``"origin_changed"``, …). The OpenAPI document
            lists all codes. It is ``""`` if the error does not come from a server.
        hint: what a person can do about the error; may be ``""``.
        retryable: whether the same call may succeed later without a change of the data or the configuration.
            The call has already been retried until its timeout.
    """

    code: str
    hint: str
    retryable: bool

    def __init__(self, message: str, code: str = "", hint: str = "", retryable: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint
        self.retryable = retryable

    if sys.version_info < (3, 11):

        def add_note(self, note: str) -> None:
            """Adds a note, as every exception does since Python 3.11. Tracebacks show notes since then."""
            self.__notes__ = [*getattr(self, "__notes__", []), note]


class NotFound(FletchError, LookupError):
    """The object does not exist, or this principal may not see it."""


class Invalid(FletchError, ValueError):
    """The request is not valid: for example a bad name, a bad setting, or a missing token."""


class Corrupt(FletchError):
    """Bytes or tables do not match the version, or an object changed after it was indexed."""


class Unavailable(FletchError):
    """The server or its origin did not answer within the timeout. A later call may succeed."""


class Overloaded(FletchError):
    """The server was at a limit until the timeout. Wait, then call again."""


class Internal(FletchError):
    """A defect of Fletch."""
