"""Waits for a server that is gone, for a limited time.

Invariant: whoever waits says so at once, and then once a minute.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Callable

from .. import FletchError, Invalid, Unavailable

_log = logging.getLogger("fletch")

#: The seconds for which a loop waits for a server that is gone, by default. It is less than the ten minutes
#: after which ``torch.distributed`` ends ranks that wait for another rank.
SERVER_WAIT_SECONDS = 540.0

#: The seconds between two warnings of the same wait.
_WARN_SECONDS = 60.0

#: The periods in which a process waited for a server that was gone: begin and end, in nanoseconds of the
#: monotonic clock, which all processes of a machine share.
Stalls = list[tuple[int, int]]

#: Is called while the server is gone, with the seconds since the call began and the reason.
Report = Callable[[float, str], None]


def checked_server_wait(seconds: float | None) -> float | None:
    """The setting ``server_wait``, if it is valid.

    Raises:
        Invalid: it is no number of seconds.
    """
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise Invalid(f"server_wait is {seconds!r}; give seconds, or None to wait for ever")
    return float(seconds)


class ServerWait:
    """A call that may wait for a server that is gone. Logs the begin and the end of the wait.

    Args:
        label: what waits, for log lines.
        most: the longest wait in seconds, or ``None``.
    """

    def __init__(self, label: str, most: float | None) -> None:
        self.label, self._most = label, most
        self.begun, self.waited = time.monotonic_ns(), False
        self._gone_since = self._warned_at = 0.0

    def report(self, seconds: float, why: str) -> None:
        """Records that the server is gone, since ``seconds`` at the first report.

        Raises:
            Unavailable: the server was gone for the longest wait.
        """
        now = time.monotonic()
        if not self.waited:
            self.waited, self._gone_since, self._warned_at = True, now - seconds, now
            _log.warning("%s waits for the server%s: %s", self.label, self._until(), why)
        gone = now - self._gone_since
        if self._most is not None and gone >= self._most:
            raise Unavailable(
                f"{self.label} gave up after {gone:.0f} s without its server (server_wait): {why}",
                hint="once a server answers, start the script again with its last state (state=…); with "
                "server_wait=None a loop waits for ever",
            )
        if now - self._warned_at >= _WARN_SECONDS:
            self._warned_at = now
            _log.warning("%s still waits for the server after %.0f s: %s", self.label, gone, why)

    def _until(self) -> str:
        return "" if self._most is None else f" (at most {self._most:.0f} s)"

    def stalls(self) -> Stalls:
        """The period of the wait so far, or nothing if the server was never gone."""
        return [(self.begun, time.monotonic_ns())] if self.waited else []

    def end(self) -> Stalls:
        """Ends the wait. Returns its period, or nothing if the server was never gone."""
        for begun, ended in (stalls := self.stalls()):
            seconds = (ended - begun) / 1e9
            _log.warning("%s continues after a wait of %.1f s for the server", self.label, seconds)
        return stalls


def wait_for_server(label: str, call: Callable[[Report], Any], most: float | None) -> tuple[Any, Stalls]:
    """Makes a call, and repeats it until the server answers.

    Args:
        label: what waits, for log lines.
        call: the call. It may report that the server is gone while it lasts.
        most: the longest wait in seconds, or ``None``.

    Returns:
        Its result, and the periods of waiting.

    Raises:
        Unavailable: the server was gone for the longest wait.
    """
    wait = ServerWait(label, most)
    while True:
        began = time.monotonic()
        try:
            return call(wait.report), wait.end()
        except FletchError as error:
            if not error.retryable:
                raise
            wait.report(time.monotonic() - began, str(error))
