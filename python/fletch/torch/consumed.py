"""What a process consumed of an epoch: the batches that are still to be acknowledged, and what was.

Invariants:
    1. What was acknowledged is counted and added up, once, and nothing else is.
    2. Batches are acknowledged in the order in which they were consumed.
    3. While the server is gone nothing is handed out whose lease may have run out (`Consumed.goes_on`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Callable

from .. import FletchError, _native
from .receive import Batch, Stalls, patiently

_log = logging.getLogger("fletch")

COUNTED = ("batches", "samples", "bytes", "redelivered", "waited_ns", "stalled_ns", "stepped_ns")

#: A server that has not answered for so long is taken for gone, in seconds; and how often, and for how long, it is tried then.
_SILENT = 3.0
_TRIED_EVERY = 3.0
_TRIED_FOR = 1.0


@dataclass
class _Taken:
    """A batch that the loop has, or had."""

    batch: Batch
    waited_ns: int
    begun_ns: int
    #: None while it is in hand.
    stepped_ns: int | None = None


class Consumed:
    """What one process consumed of one epoch.

    Attributes:
        job: whom to tell.
        counts: of what was acknowledged, by the names in `COUNTED`.
        sum: of what was acknowledged, added up as a receipt is.
    """

    def __init__(self, job: _native.Job, name: str, epoch: int, root: str) -> None:
        self.job, self._what, self._name, self._epoch = job, f"job {name}, epoch {epoch}", name, epoch
        self.counts = dict.fromkeys(COUNTED, 0)
        self.sum = _native.Sum(root)
        self._taken: deque[_Taken] = deque()
        self._added: int | None = None
        #: Until when stalls are counted, in nanoseconds of the monotonic clock.
        self._stalled_until = 0
        #: When the server last answered an ack (or the first batch was taken), when it was found to be gone, and last tried.
        self._heard: float | None = None
        self._gone: float | None = None
        self._tried = 0.0

    def open(self) -> bool:
        """Whether a batch is in hand, or consumed and not acknowledged."""
        return len(self._taken) > 0

    def samples_open(self) -> int:
        """How many samples that is, pads included."""
        return sum(taken.batch.held[3] for taken in self._taken)

    def in_hand(self) -> Batch | None:
        """The batch that the loop has, and has not said that it is consumed."""
        return self._taken[-1].batch if self._taken and self._taken[-1].stepped_ns is None else None

    def take(self, batch: Batch, waited_ns: int) -> None:
        """A batch is in hand, and this process holds its lease."""
        self._heard = time.monotonic() if self._heard is None else self._heard
        self._taken.append(_Taken(batch, waited_ns, time.monotonic_ns()))
        self.hold(batch)

    def hold(self, batch: Batch) -> None:
        """A batch was received: from now on this process renews its lease."""
        self.patiently(lambda _: self.job.hold(batch.held))

    def step(self) -> None:
        """What is in hand was consumed."""
        if self._taken and (last := self._taken[-1]).stepped_ns is None:
            last.stepped_ns = time.monotonic_ns() - last.begun_ns
            last.batch.content = None

    def let_go(self, owed: bool = False) -> None:
        """What is in hand was not consumed; with ``owed``, nothing is that was not acknowledged."""
        while self._taken and (owed or self._taken[-1].stepped_ns is None):
            self.job.drop_lease(self._taken[-1].batch.held)
            self._taken.pop()

    def hold_no_more(self) -> None:
        """What this process holds beside what is in hand or owed got lost on its way to the loop (an interrupt, an error):
        nobody hands it out, and it comes again.
        """
        self.job.hold_only([taken.batch.held for taken in self._taken])

    def pay(self, more: bool = False) -> bool:
        """Acknowledges what was consumed; whether all of that counts, and nothing of it is delivered again.

        A server that is gone is waited for, unless there may be ``more`` that was received already: then acks are owed
        until it is back, and the loop goes on, for as long as `goes_on` says.

        Raises:
            FletchError: the server refused them for good (the epoch is closed, the job is gone): they are given up.
        """
        counts = True
        # A signal may raise anywhere in here (Ctrl-C, a worker that died): a batch stays until it is acknowledged, and is
        # counted once.
        while self._taken and (stepped := self._taken[0].stepped_ns) is not None:
            taken = self._taken[0]
            _, _, lease, entries, ttl_ms = taken.batch.held
            try:
                if not self._acked(taken, stepped, self.goes_on(ttl_ms) if more else 0.0):
                    return counts
            except FletchError as error:
                if error.code != "lease_gone":
                    self.let_go(owed=True)
                    raise
                self._answered()
                # It took longer than a lease lives without a word, and is delivered again.
                _log.warning("%s: %s", self._what, error)
                self.counts["redelivered"] += entries
                self.job.drop_lease(taken.batch.held)
                self._taken.popleft()
                counts = False
                continue
            if self._added != lease:
                self._stalled(taken.batch.stalls)
                counted = self._with(taken, stepped, entries)
                # Signals raise where a call begins or ends: between these there is none.
                self._added, self.counts = lease, counted
                self.sum.add(taken.batch.deliveries)
            self._taken.popleft()
        return counts

    def _with(self, taken: _Taken, stepped_ns: int, entries: int) -> dict[str, int]:
        """The counts, and this batch."""
        more = {"batches": 1, "samples": entries, "bytes": taken.batch.nbytes, "waited_ns": taken.waited_ns}
        more["stepped_ns"] = stepped_ns
        return {key: count + more.get(key, 0) for key, count in self.counts.items()}

    def _stalled(self, stalls: Stalls) -> None:
        """The server was gone then. Workers and this process wait at the same time: what is counted is not counted again."""
        for begun, ended in stalls:
            self.counts["stalled_ns"] += max(ended - max(begun, self._stalled_until), 0)
            self._stalled_until = max(ended, self._stalled_until)

    def goes_on(self, ttl_ms: int) -> float:
        """For how many seconds more what is held is surely held, or less than 0: half of the time that a lease lives, from the
        last answer on. Leases are renewed when a third of it is over, so that nobody else has been given them by then.
        """
        return 0.0 if self._heard is None else self._heard + ttl_ms / 2000 - time.monotonic()

    def _acked(self, taken: _Taken, stepped_ns: int, within: float) -> bool:
        """Whether a batch was acknowledged; the server is waited for, unless so many seconds are left to try it in."""
        token, times = taken.batch.held, (taken.waited_ns, taken.batch.prepared_ns, stepped_ns)
        if within <= 0:
            self.patiently(lambda tell: self.job.ack(token, times, tell))
            self._answered()
            return True
        begun = time.monotonic()
        if self._gone is not None and begun - self._tried < _TRIED_EVERY:
            return False
        why = "no answer"
        try:
            most = _SILENT if self._gone is None else _TRIED_FOR
            if self.job.ack(token, times, _nothing, min(within, most)) is not None:
                self._answered()
                return True
        except FletchError as error:
            if not error.retryable:
                raise
            why = str(error)
        self._tried = time.monotonic()
        self._stalled([(int(begun * 1e9), int(self._tried * 1e9))])
        if self._gone is None:
            self._gone = begun
            _log.warning("%s goes on without the server, with what was received: %s", self._what, why)
        return False

    def _answered(self) -> None:
        self._heard = time.monotonic()
        if self._gone is not None:
            _log.warning("%s: the server is back after %.1f s", self._what, time.monotonic() - self._gone)
            self._gone = None

    def patiently(self, call: Callable[[Callable[[float, str], None]], Any]) -> Any:
        """A call that waits for a server that is gone, says so, and counts the time."""
        done, stalls = patiently(self._name, self._epoch, call)
        self._stalled(stalls)
        return done


def _nothing(_seconds: float, _why: str) -> None:
    """Who waits for a moment only says nothing about it."""
