"""The journal of the leases that workers got, from which the process of the loop releases the lost ones.

Torch ends the workers of a loop that was left, and kills those that do not end in time. Then their batches
are in no queue and in no process. So each worker lists the leases that it gets, before it does anything with
them, and the process of the loop reads the list when the workers have ended.

Invariants:
    1. A lease whose batch the loop got is not released: the loop, or `state_dict`, decides about it.
    2. Only the worker of that number writes its slots. The latest lease replaces the oldest one.
"""

from __future__ import annotations

import logging
import os
import weakref
from array import array
from multiprocessing.reduction import DupFd
from typing import Any

from ..epochs.ack_tracking import AckTracker

_log = logging.getLogger("fletch")

#: The slots of a worker besides those of the batches under way: leases that its reader asked for ahead, and
#: leases that replaced expired ones.
_SLOTS_MORE = 16


class LeaseJournal:
    """The numbers of the leases that the workers of one iteration got last. The process of the loop makes it.

    Args:
        acks: knows the batches that the loop got.
        rank: the rank of the leases.
        workers: the number of workers.
        under_way: the most batches of a worker that the loop asked for and did not get yet.
    """

    def __init__(self, acks: AckTracker, rank: int, workers: int, under_way: int) -> None:
        self._acks, self._rank = acks, rank
        self._slots = 2 * under_way + _SLOTS_MORE
        self._length = workers * self._slots * array("Q").itemsize
        self._own(os.memfd_create("fletch-leases", os.MFD_CLOEXEC))
        os.ftruncate(self._fd, self._length)

    def _own(self, fd: int) -> None:
        self._fd = fd
        # When Python ends, the loader still reads the file after such calls were made.
        weakref.finalize(self, os.close, fd).atexit = False  # type: ignore[misc]

    def __getstate__(self) -> dict[str, Any]:
        # Works only while a worker is being started, as torch's own shared memory.
        return {"_slots": self._slots, "_fd": DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._slots = state["_slots"]
        self._own(state["_fd"].detach())

    def slots_of(self, worker: int) -> tuple[int, int, int]:
        """The journal for the reader of a worker: the file, the first slot, and the number of slots."""
        return self._fd, worker * self._slots, self._slots

    def settle(self) -> None:
        """Waits a moment until the server knows of the released leases."""
        self._acks.settle()

    def release_lost(self) -> None:
        """Releases the leases whose batches the loop did not get. Call it after the workers ended."""
        self._acks.release_lost(self._rank, array("Q", os.pread(self._fd, self._length, 0)))


def lease_journal(acks: AckTracker, rank: int, workers: int, under_way: int) -> LeaseJournal | None:
    """The journal of a loader with workers, or ``None`` if this machine has no such file."""
    if workers == 0 or not hasattr(os, "memfd_create"):
        return None
    try:
        return LeaseJournal(acks, rank, workers, under_way)
    except OSError as error:
        _log.info("the leases of workers that are killed will expire, because a file failed: %s", error)
        return None
