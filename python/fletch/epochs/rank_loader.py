"""How a process names itself as a rank of a job, and how it gives the rank up.

The process that makes an `EpochDataset` draws an id. Its workers inherit the id, however they are started. So
the server can tell a second process of the same rank from a worker of the first one.

Invariant: only the process that drew the id gives the rank up.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import socket
import time
import weakref
from typing import Any, Callable

from .. import FletchError, _native

_log = logging.getLogger("fletch")

#: When this process started, in milliseconds since 1970. A forked process has another number of its own.
_SINCE_MS = int(time.time() * 1000)

#: The longest time for which the end of a process waits until the server knows of it, in seconds.
_LEAVE_SECONDS = 2.0

#: The errors of a farewell that has no effect: another process has the rank, or the server forgot the epoch.
_NOTHING_TO_LEAVE = ("rank_taken", "rank_in_use", "not_found", "epoch_closed")

#: The longest host name that the server accepts, in bytes.
_HOST_BYTES = 255


class RankLoader:
    """The name of a process as a rank of a job.

    Args:
        take_over: whether the process takes the rank over from another process that lives.

    Attributes:
        id: 32 hexadecimal digits, drawn at random.
        text: the name as JSON, as requests carry it.
    """

    def __init__(self, take_over: bool) -> None:
        self.id = secrets.token_hex(16)
        self._pid = os.getpid()
        name = {"id": self.id, "host": _host(), "pid": self._pid, "since_ms": _SINCE_MS}
        self.text = json.dumps({**name, **({"take_over": True} if take_over else {})})
        self._job: _native.Job | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_job": None}

    def declare(self, client: _native.Client, spec: dict[str, Any]) -> _native.Job:
        """Declares a job whose requests carry this name."""
        self._job = _native._declare(client, json.dumps(spec), self.text)
        return self._job

    def describe(
        self, client: _native.Client, spec: dict[str, Any]
    ) -> tuple[_native.Job, dict[str, Any]] | None:
        """A job whose server is away, and its description without epochs. ``None`` if a server has it.

        The first request of the job declares it, and waits for its server.
        """
        text = _native._describe(client, json.dumps(spec))
        if text is None:
            return None
        info: dict[str, Any] = json.loads(text)
        declared = json.dumps({**spec, "world": info["world"]})
        self._job = _native._job(client, declared, self.text)
        return self._job, info

    def leave(self, within: float | None = None) -> None:
        """Gives up every rank as which this process read, with its leases.

        Waits ``within`` so many seconds for the server's answer. Without it the request is made in the
        background.
        """
        if self._job is None or os.getpid() != self._pid:
            return
        try:
            self._job.leave(within)
        except FletchError as error:
            if error.code in _NOTHING_TO_LEAVE:
                return
            _log.warning(
                "could not tell the server that this process has ended, so a restart waits until the server "
                "notices: %s", error,
            )


def _host() -> str:
    name = "".join(c for c in socket.gethostname() if c.isprintable())
    return name.encode(errors="replace")[:_HOST_BYTES].decode(errors="ignore") or "unknown"


#: The living owners of names, by the function that ends their iteration and then gives the rank up.
_LIVING: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def leave_at_end(owner: Any, loader: RankLoader, end: Callable[[Any], None]) -> None:
    """Gives the rank up when ``owner`` is freed, and when the process ends; then ``end(owner)`` comes first.

    A process that is killed gives nothing up.
    """
    finalizer = weakref.finalize(owner, loader.leave)
    # At the end of the process `end` comes first.
    finalizer.atexit = False  # type: ignore[misc]
    _LIVING[owner] = end


@atexit.register
def _leave_all() -> None:
    for owner, end in list(_LIVING.items()):
        end(owner)


def leave_now(loader: RankLoader) -> None:
    """Gives the rank up because the process ends."""
    loader.leave(_LEAVE_SECONDS)
