"""The batches that a process consumed and has to acknowledge, and the sums of those that it acknowledged.

Must never: count a batch before the server acknowledged it.

Invariants:
    1. Each acknowledged batch is counted and added to the sum once. No other batch is.
    2. Batches are acknowledged in the order in which they were consumed.
    3. While the server is gone, the loop gets no batch whose lease may have expired
       (`AckTracker.seconds_held`).
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, Callable, Iterable

from .. import FletchError, Unavailable, _native
from .device_clock import DeviceClock, cuda_event
from .lease_stream import Batch
from .server_wait import SERVER_WAIT_SECONDS, Report, Stalls, wait_for_server

_log = logging.getLogger("fletch")

#: The names of the counters of an epoch.
COUNTERS = (
    "batches", "samples", "bytes", "shared_bytes", "redelivered", "skipped",
    "waited_ns", "stalled_ns", "stepped_ns",
)

#: A server that gives no answer for this many seconds counts as gone.
_SILENT_SECONDS = 3.0
#: The seconds between two attempts to reach a server that is gone, and the seconds that an attempt lasts.
_RETRY_EVERY_SECONDS = 3.0
_RETRY_SECONDS = 1.0
#: The seconds for which a process that ends, or that drops its dataset, waits until the server knows of the
#: leases that it dropped.
_END_SECONDS = 0.5
#: The latest leases that are remembered as handed out.
_HANDED_OUT_MAX = 4096


@dataclass
class _TrackedBatch:
    """A batch that the loop got and that is not acknowledged."""

    batch: Batch
    waited_ns: int
    begun_ns: int
    #: The loop itself prepared the batch, without workers.
    in_loop: bool = False
    #: The time in which the loop prepared the batch after it got it.
    prepared_ns: int = 0
    #: The time of the step; None while the batch is in hand.
    stepped_ns: int | None = None
    #: The device's time of a step, once it is known: of this one or of an earlier one.
    device_ns: int | None = None


class AckTracker:
    """What one process consumed of one epoch, and what of it is acknowledged.

    A batch is *in hand* from `hand_out` until `mark_consumed`, and *unacknowledged* from then until
    `flush_acks`.

    Attributes:
        job: the job whose server gets the acks.
        counts: the counters of the acknowledged batches, by the names in `COUNTERS`.
        sum: the receipt sum of the acknowledged batches.
    """

    def __init__(
        self,
        job: _native.Job,
        name: str,
        epoch: int,
        root: str,
        device: DeviceClock | None = None,
        server_wait: float | None = SERVER_WAIT_SECONDS,
    ) -> None:
        self.job, self._label, self._epoch = job, f"job {name}, epoch {epoch}", epoch
        self._server_wait = server_wait
        self.counts = dict.fromkeys(COUNTERS, 0)
        self.sum = _native.ReceiptSum(root)
        self._batches: deque[_TrackedBatch] = deque()
        self._device = DeviceClock(cuda_event) if device is None else device
        #: The lease that was counted last.
        self._counted_lease: int | None = None
        #: The end of the stalls that are counted, in nanoseconds of the monotonic clock.
        self._stalls_counted_until = 0
        #: When the server last answered an ack (or the first batch was handed out), when it was found to be
        #: gone, and when it was last tried. Seconds of the monotonic clock.
        self._answered_at: float | None = None
        self._gone_since: float | None = None
        self._tried_at = 0.0
        #: The leases that were handed out last.
        self._handed_out: deque[int] = deque(maxlen=_HANDED_OUT_MAX)
        weakref.finalize(self, _let_go, self.__dict__, os.getpid())

    def has_unacked(self) -> bool:
        """Whether a batch is in hand or unacknowledged."""
        return len(self._batches) > 0

    def unacked_samples(self) -> int:
        """The number of samples in hand or unacknowledged, including those that pad a last step."""
        return sum(tracked.batch.held[3] for tracked in self._batches)

    def in_hand(self) -> Batch | None:
        """The batch in hand, if there is one."""
        return self._batches[-1].batch if self._batches and self._batches[-1].stepped_ns is None else None

    def hand_out(
        self, batch: Batch, waited_ns: int, in_loop: bool = False, is_stepped: bool = True
    ) -> bool:
        """Records that the loop gets this batch. From now on this process renews its lease.

        Without ``is_stepped`` nobody knows when the loop steps.

        Returns whether the batch counts. If its server was lost since, it is dropped: its samples come again.
        """
        self._answered_at = time.monotonic() if self._answered_at is None else self._answered_at
        self._batches.append(_TrackedBatch(batch, waited_ns, time.monotonic_ns(), in_loop))
        self._handed_out.append(batch.lease)
        if not self.hold(batch):
            self.drop()
            return False
        if is_stepped:
            self._device.begin()
        return True

    def begin_step(self) -> None:
        """Records that the loop has prepared the batch in hand itself, and steps from now on."""
        if self._batches and (last := self._batches[-1]).stepped_ns is None:
            now = time.monotonic_ns()
            last.prepared_ns += now - last.begun_ns
            last.begun_ns, last.in_loop = now, True
            self._device.begin()

    def hold(self, batch: Batch) -> bool:
        """Renews the lease of a batch from now on. Returns whether the batch counts."""
        return bool(self.wait_for_server(lambda _: self.job.hold(batch.held, batch.grant)))

    def join(self, rank: int) -> None:
        """Records what this process consumes as this rank, so that the job outlives its server."""
        self.wait_for_server(lambda _: self.job.join(self._epoch, rank))

    def mark_consumed(self) -> None:
        """Records that the loop consumed the batch in hand."""
        if self._batches and (last := self._batches[-1]).stepped_ns is None:
            last.stepped_ns = time.monotonic_ns() - last.begun_ns
            last.batch.content = None
            self._device.end()
            # One time an ack: if it is that of an earlier step, so are all after it.
            last.device_ns = self._device.take()

    def drop(self, unacked: bool = False) -> None:
        """Drops the batch in hand; with ``unacked`` also every unacknowledged batch.

        The server delivers them again.
        """
        while self._batches and (unacked or self._batches[-1].stepped_ns is None):
            self.job.drop_lease(self._batches[-1].batch.held)
            self._batches.pop()

    def drop_lost(self) -> None:
        """Drops every lease that this process holds and that is neither in hand nor unacknowledged.

        An interrupt or an error lost these batches on their way to the loop. The server delivers them again.
        """
        self.job.hold_only([tracked.batch.held for tracked in self._batches])

    def release_lost(self, rank: int, leases: Iterable[int]) -> None:
        """Releases those leases of workers whose batches were never handed out. 0 is no lease."""
        handed_out = {0, *self._handed_out, *(tracked.batch.lease for tracked in self._batches)}
        lost = [lease for lease in leases if lease not in handed_out]
        if lost:
            self.job.release(self._epoch, rank, lost)

    def settle(self) -> None:
        """Waits a moment until the server knows of the dropped and released leases."""
        self.job.settle(_END_SECONDS)

    def flush_acks(self, more: bool = False) -> bool:
        """Acknowledges the consumed batches. Returns whether all of them count and none is delivered again.

        It waits for a server that is gone. But if there may be ``more`` received batches, it keeps the acks
        until the server is back, and the loop continues for `seconds_held`.

        Raises:
            FletchError: the server refused the acks for good, because the epoch is closed or the job is gone.
                The batches are dropped.
        """
        all_count = True
        # A signal handler may raise anywhere in here (Ctrl-C, a worker that died). So a batch stays in the
        # queue until it is acknowledged, and is counted once.
        while self._batches and (stepped := self._batches[0].stepped_ns) is not None:
            tracked = self._batches[0]
            _, _, lease, entries, ttl_ms = tracked.batch.held
            try:
                if not self._try_ack(tracked, stepped, self.seconds_held(ttl_ms) if more else 0.0):
                    return all_count
            except FletchError as error:
                if error.code != "lease_gone":
                    self.drop(unacked=True)
                    raise
                self._note_answer()
                # The step took longer than the lease lives without a renewal, so the server delivers the
                # batch again.
                _log.warning("%s: %s", self._label, error)
                self.counts["redelivered"] += entries
                self.job.forget_lease(tracked.batch.held)
                self._batches.popleft()
                all_count = False
                continue
            if self._counted_lease != lease:
                self.count_stalls(tracked.batch.stalls)
                counted = self._counts_with(tracked, stepped, entries)
                # Signal handlers run where a call begins or ends. There is no call between these two
                # assignments.
                self._counted_lease, self.counts = lease, counted
                self.sum.add(tracked.batch.deliveries)
            self._batches.popleft()
        return all_count

    def _counts_with(self, tracked: _TrackedBatch, stepped_ns: int, entries: int) -> dict[str, int]:
        """The counters after this batch."""
        more = {"batches": 1, "samples": entries, "bytes": tracked.batch.nbytes}
        more |= {"shared_bytes": tracked.batch.shared, "skipped": tracked.batch.skipped}
        more |= {"waited_ns": tracked.waited_ns, "stepped_ns": stepped_ns + tracked.prepared_ns}
        return {key: count + more.get(key, 0) for key, count in self.counts.items()}

    def count_stalls(self, stalls: Stalls) -> None:
        """Counts the time of these stalls.

        Time in which a worker and this process both waited counts once.
        """
        for begun, ended in stalls:
            self.counts["stalled_ns"] += max(ended - max(begun, self._stalls_counted_until), 0)
            self._stalls_counted_until = max(ended, self._stalls_counted_until)

    def seconds_held(self, ttl_ms: int) -> float:
        """The seconds for which the held leases are certainly valid; below 0 if they may have expired.

        It is half of the time that a lease lives, from the server's last answer on. A lease is renewed after
        a third of that time, so no other process can have been granted its samples before then.
        """
        return 0.0 if self._answered_at is None else self._answered_at + ttl_ms / 2000 - time.monotonic()

    def _try_ack(self, tracked: _TrackedBatch, stepped_ns: int, within: float) -> bool:
        """Whether the server acknowledged a batch.

        Waits for the server unless ``within`` seconds are left to try.
        """
        token, own_ns = tracked.batch.held, tracked.prepared_ns
        # A loop that prepares its batches computes nothing meanwhile, so its time counts, not the workers'.
        prepared_ns = own_ns if own_ns > 0 else tracked.batch.prepared_ns
        received_ns, in_loop = tracked.batch.received_ns, tracked.in_loop
        times = (tracked.waited_ns + own_ns, prepared_ns, stepped_ns, tracked.device_ns, received_ns)
        if within <= 0:
            self.wait_for_server(lambda report: self.job.ack(token, times, report, None, in_loop))
            self._note_answer()
            return True
        begun = time.monotonic()
        if self._gone_since is not None and begun - self._tried_at < _RETRY_EVERY_SECONDS:
            return False
        why = "no answer"
        try:
            most = _SILENT_SECONDS if self._gone_since is None else _RETRY_SECONDS
            if self.job.ack(token, times, _no_report, min(within, most), in_loop) is not None:
                self._note_answer()
                return True
        except FletchError as error:
            if not error.retryable:
                raise
            why = str(error)
        self._tried_at = time.monotonic()
        self.count_stalls([(int(begun * 1e9), int(self._tried_at * 1e9))])
        if self._gone_since is None:
            self._gone_since = begun
            _log.warning("%s goes on without the server, with received batches: %s", self._label, why)
        return False

    def _note_answer(self) -> None:
        self._answered_at = time.monotonic()
        if self._gone_since is not None:
            seconds = time.monotonic() - self._gone_since
            _log.warning("%s: the server is back after %.1f s", self._label, seconds)
            self._gone_since = None

    def wait_for_server(self, call: Callable[[Report], Any]) -> Any:
        """Makes a call, waits for the server if it is gone, logs the wait and counts its time."""
        begun = time.monotonic_ns()
        try:
            result, stalls = wait_for_server(self._label, call, self._server_wait)
        except Unavailable:
            self.count_stalls([(begun, time.monotonic_ns())])
            raise
        self.count_stalls(stalls)
        return result


def _no_report(_seconds: float, _why: str) -> None:
    """Reports nothing: a short wait needs no log line."""


def _let_go(tracker: dict[str, Any], pid: int) -> None:
    """Releases the batch in hand of a tracker that is gone, also when Python ends.

    Nobody can acknowledge it any more. Batches that were consumed and not acknowledged stay: their leases
    expire.
    """
    if os.getpid() != pid:
        # A fork copied the tracker, and its batches belong to the process that forked.
        return
    for tracked in tracker["_batches"]:
        if tracked.stepped_ns is None:
            tracker["job"].drop_lease(tracked.batch.held)
    tracker["job"].settle(_END_SECONDS)
