"""The iteration of a loader over epochs: takes batches from workers, in order, and acknowledges each one.

Invariants:
    1. A batch that the loop did not get is not acknowledged, and its lease is released at the latest when the
       iteration ends.
    2. In every order but ``substitute``, and in every plan with an echo, the loop gets the order in which the
       server grants leases, with any number of workers.
    3. A worker lives until the loop has the batches that it received: until then only the worker renews their
       leases.
"""

from __future__ import annotations

import inspect
import os
import time
import traceback
import weakref
from collections import deque
from functools import partial
from multiprocessing.connection import wait
from typing import Any, Callable, Generator, Iterator

import torch.utils.data

from .. import FletchError
from ..epochs.iteration import EpochIteration, acknowledged_batches
from ..epochs.lease_stream import Batch
from .epochs import EpochDataset
from .lease_journal import LeaseJournal

#: A lock that is not free within this many seconds has an owner that will not release it.
_STALE_LOCK_SECONDS = 5.0

#: The pause after an answer of a worker that has nothing more, in seconds.
_PAUSE_SECONDS = 0.01

#: The seconds in which a killed process may still look alive after its connections broke.
_DYING_SECONDS = 1.0


class _LeaseDataset(torch.utils.data.IterableDataset[Any]):
    """The dataset that torch's loader iterates: whole leases, collated in the process that receives them."""

    def __init__(self, dataset: EpochDataset, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate = collate
        #: Lists the leases of the workers. Set while torch starts them.
        self.journal: LeaseJournal | None = None

    def __iter__(self) -> Iterator[Batch]:
        info = torch.utils.data.get_worker_info()
        worker = 0 if info is None else info.id
        # A loop without workers may be left and continued later, so it holds only the batch in hand. Under
        # at-most-once a granted sample counts as delivered, so it must not be requested early.
        prefetch = info is not None and self.dataset._visitation != "at-most-once"
        last = Batch(None, worker=worker, ended=True)
        try:
            slots = None if self.journal is None else self.journal.slots_of(worker)
            for batch in self.dataset._leases(worker, self.collate, prefetch, slots):
                batch.worker = worker
                yield batch
        except FletchError as error:
            # Torch replaces an error of a worker by a new one with the same text, and loses its code. An
            # error of a foreign class may not be picklable, so it is left to torch.
            if info is None or type(error).__module__ != FletchError.__module__:
                raise
            # A new error, because the attributes that others added may not be picklable.
            last.error = type(error)(str(error), error.code, error.hint, error.retryable)
            notes = [*getattr(error, "__notes__", []), f"in worker {worker}:\n{traceback.format_exc()}"]
            last.error.add_note("\n".join(notes))
        # Torch ends a worker that yields nothing more, even if its batches still wait for the loop.
        while True:
            yield last


class _Iteration(EpochIteration):
    """An iteration of a loader."""

    def __init__(self, dataset: EpochDataset, torch_iterator: Any, workers: int, collate: Any) -> None:
        self._torch_iterator = torch_iterator if workers else None
        # A loader with a timeout does not wait for its workers as long as for a server, so the wait must be
        # in the acks.
        more = workers > 0 and not getattr(torch_iterator, "_timeout", 0)
        received = _all_batches(dataset, torch_iterator, workers, collate)
        end = partial(_end_workers, torch_iterator) if workers else lambda: None
        batches = acknowledged_batches(dataset, received, workers == 0, more, end)
        super().__init__(dataset.job, batches)
        if workers:
            weakref.finalize(self, _end_unasked, self._batches, torch_iterator, self._pid)

    def close(self) -> None:
        """Ends the iteration and its workers. A batch in hand stays in hand."""
        super().close()
        if self._torch_iterator is not None:
            # If no batch was asked for, the generator did not run and has not ended the workers.
            _end_workers(self._torch_iterator)
            self._torch_iterator = None


def _end_unasked(batches: Generator[Any, None, None], torch_iterator: Any, pid: int) -> None:
    """Ends the workers of an iteration that is gone and was never asked for a batch.

    Its generator did not begin, so the end of the generator does not end them.
    """
    if pid == os.getpid() and inspect.getgeneratorstate(batches) == inspect.GEN_CREATED:
        _end_workers(torch_iterator)


def _shut_down_workers(torch_iterator: Any) -> None:
    """Ends the workers of torch's iterator. Called in the process that iterates."""
    for queue in torch_iterator._index_queues:
        # Ctrl-C may interrupt this thread after it took the lock of a queue and before it can release it.
        # Then torch's own shutdown would wait for this thread for ever. No other thread holds the lock for
        # long, so release it here.
        queue._notempty.acquire(timeout=_STALE_LOCK_SECONDS)
        queue._notempty.release()
    torch_iterator._shutdown_workers()


def _end_workers(torch_iterator: Any) -> None:
    """Ends the workers of a loop that was left, and releases the leases of batches that it did not get."""
    _shut_down_workers(torch_iterator)
    journal: LeaseJournal | None = getattr(torch_iterator, "_fletch_journal", None)
    if journal is not None:
        journal.release_lost()


def _in_order(dataset: EpochDataset, batches: Iterator[Batch], workers: int) -> Iterator[Batch]:
    """Yields the batches of several workers in the order of their grants, which is the epoch's order.

    A batch is yielded when every worker has a batch that was granted later, or has none to get.
    """
    waiting: dict[int, deque[Batch]] = {worker: deque() for worker in range(workers)}
    idle: dict[int, bool] = {}
    try:
        for batch in batches:
            if batch.token is None:
                # An idle worker that asks again gets a batch that is granted later than all waiting ones.
                idle[batch.worker] = batch.ended
            else:
                idle.pop(batch.worker, None)
                if not dataset._acks.hold(batch):
                    dataset._job.drop_lease(batch.held)
                    continue
                waiting[batch.worker].append(batch)
            while all(queue or worker in idle for worker, queue in waiting.items()):
                if (first := _take_first(waiting)) is None:
                    break
                yield first
        while (first := _take_first(waiting)) is not None:
            yield first
    finally:
        for batch in (b for queue in waiting.values() for b in queue):
            dataset._job.drop_lease(batch.held)


def _take_first(waiting: dict[int, deque[Batch]]) -> Batch | None:
    """Removes the batch that was granted first. Each worker's own batches are in order."""
    heads = [queue for queue in waiting.values() if queue]
    return min(heads, key=lambda queue: queue[0].lease).popleft() if heads else None


def _received(torch_iterator: Iterator[Batch], workers: int) -> Iterator[Batch]:
    """Yields the batches of all workers until none has more.

    A worker that dies while it sends a batch breaks the connection. This function reports it as torch reports
    a worker that it found dead.
    """
    ended: set[int] = set()
    try:
        for batch in torch_iterator:
            if batch.error is not None:
                raise batch.error
            if batch.worker in ended and not getattr(torch_iterator, "_in_order", True):
                # If torch takes batches out of order, workers that have nothing more answer again and again
                # at once.
                time.sleep(_PAUSE_SECONDS)
            yield batch
            if batch.ended:
                ended.add(batch.worker)
            if len(ended) == max(workers, 1):
                break
    except (OSError, EOFError) as error:
        # A worker that ended well did not break the connection.
        made: list[Any] = torch_iterator._workers if workers else []  # type: ignore[attr-defined]
        running = [w for w in made if w.exitcode != 0]
        dead = set(wait([w.sentinel for w in running], _DYING_SECONDS)) if running else set()
        if not dead:
            raise
        pids = ", ".join(str(w.pid) for w in running if w.sentinel in dead)
        raise RuntimeError(f"DataLoader worker (pid(s) {pids}) exited unexpectedly") from error
    if workers:
        # The loop has every batch that the workers received.
        _shut_down_workers(torch_iterator)


def _all_batches(
    dataset: EpochDataset, torch_iterator: Iterator[Batch], workers: int, collate: Any
) -> Iterator[Batch]:
    """Yields the workers' batches, then what killed workers held, until nothing is left of the epoch."""
    received = _received(torch_iterator, workers)
    yield from _in_order(dataset, received, workers) if dataset._fixed_order and workers > 1 else received
    yield from dataset._rest_of_leases(workers, collate)
