"""What a training loop iterates: leases from workers, in the order of the epoch, acknowledged one by one.

Invariants:
    1. A batch that was not handed to the loop is not acknowledged, and is held no longer than the loop.
    2. Where the order is known (all but ``substitute``), the loop gets it, with any number of workers.
"""

from __future__ import annotations

import time
from collections import deque
from multiprocessing.connection import wait
from typing import Any, Callable, Iterator

import torch.utils.data

from .epochs import _AGAIN, EpochDataset
from .receive import Batch

#: A lock that is not free for so long, in seconds, has nobody who will give it back.
_STALE = 5.0

#: How long a process that was killed is seen as living after its connections broke, in seconds.
_DYING = 1.0


class _Leases(torch.utils.data.IterableDataset[Any]):
    """What a loader iterates: whole leases of the dataset, collated where they are received."""

    def __init__(self, dataset: EpochDataset, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate = collate

    def __iter__(self) -> Iterator[Batch]:
        info = torch.utils.data.get_worker_info()
        worker = 0 if info is None else info.id
        # A loop without workers may be left and come back: it holds nothing but what it has in hand. What is asked for counts
        # as delivered at most once, whoever gets it.
        ahead = info is not None and self.dataset._visitation != "at-most-once"
        for batch in self.dataset._leases(worker, self.collate, ahead):
            batch.worker = worker
            yield batch
        yield Batch(None, worker=worker, ended=True)


def _steps(dataset: EpochDataset, made: Iterator[Batch], workers: int, collate: Any) -> Iterator[Any]:
    """Batches for the loop. Asking for the next one acknowledges the one before."""
    dataset._mode = None if dataset._visitation != "at-most-once" else "at-most-once"
    # A loader with a timeout does not wait for its workers as long as for a server: the loop waits where it acknowledges.
    more = workers > 0 and not getattr(made, "_timeout", 0)
    asked, given = time.monotonic_ns(), True
    try:
        for batch in _all(dataset, made, workers, collate):
            if batch.token is None:
                # It may be that there are none before what is owed was acknowledged.
                dataset._consumed.pay(more)
                continue
            # That may have taken long: what is handed out must be held still.
            dataset._consumed.pay(more)
            given = False
            dataset._consumed.take(batch, time.monotonic_ns() - asked)
            yield batch.content
            given = True
            dataset._consumed.step()
            dataset._consumed.pay(more)
            asked = time.monotonic_ns()
    except GeneratorExit:
        # The loop was left with a batch in hand; `state_dict` or the next iteration says what becomes of it.
        raise
    except BaseException:
        if not given:
            # What was raised came between the worker and the loop, which never got the batch.
            dataset._consumed.let_go()
        raise
    finally:
        # Workers renew what they hold: those of a loop that was left must not live on.
        if workers:
            _shut(made)
    dataset._ended()


def _shut(made: Any) -> None:
    """Ends the workers of an iteration of torch's. Of the process that iterates."""
    for queue in made._index_queues:
        # Ctrl-C may come when this thread just got the lock of a queue, and before it knows that it has to give it back: then
        # it would wait here for itself. Nobody else has it for more than a moment.
        queue._notempty.acquire(timeout=_STALE)
        queue._notempty.release()
    made._shutdown_workers()


def _in_order(dataset: EpochDataset, made: Iterator[Batch], workers: int) -> Iterator[Batch]:
    """The batches of several workers in the order in which they were granted, which is that of the epoch, whichever worker
    was faster. A batch is handed on when each worker has one that came later, or has none to be had.
    """
    waiting: dict[int, deque[Batch]] = {worker: deque() for worker in range(workers)}
    idle: dict[int, bool] = {}
    try:
        for batch in made:
            if batch.token is None:
                # One that asks again later gets what comes later.
                idle[batch.worker] = batch.ended
            else:
                idle.pop(batch.worker, None)
                dataset._consumed.hold(batch)
                waiting[batch.worker].append(batch)
            while all(queue or worker in idle for worker, queue in waiting.items()):
                if (first := _first(waiting)) is None:
                    break
                yield first
        while (first := _first(waiting)) is not None:
            yield first
    finally:
        for batch in (b for queue in waiting.values() for b in queue):
            dataset._job.drop_lease(batch.held)


def _first(waiting: dict[int, deque[Batch]]) -> Batch | None:
    """Takes out the one that was granted first: each worker's own are in order."""
    heads = [queue for queue in waiting.values() if queue]
    return min(heads, key=lambda queue: queue[0].lease).popleft() if heads else None


def _received(made: Iterator[Batch], workers: int) -> Iterator[Batch]:
    """What the workers made. A worker that dies while its batch is being received breaks the connection on which the batch
    comes: that is reported as torch reports a worker that was found dead.
    """
    try:
        yield from made
    except (OSError, EOFError) as error:
        # One that has nothing more to read ends well, while others are still read from.
        running = [w for w in made._workers if w.exitcode != 0] if workers else []  # type: ignore[attr-defined]
        dead = set(wait([w.sentinel for w in running], _DYING)) if running else set()
        if not dead:
            raise
        pids = ", ".join(str(w.pid) for w in running if w.sentinel in dead)
        raise RuntimeError(f"DataLoader worker (pid(s) {pids}) exited unexpectedly") from error


def _all(dataset: EpochDataset, made: Iterator[Batch], workers: int, collate: Any) -> Iterator[Batch]:
    """What the workers made; and then what workers that died held, until nothing is left."""
    received = _received(made, workers)
    yield from _in_order(dataset, received, workers) if dataset._known and workers > 1 else received
    dataset._consumed.pay()
    while (yield from dataset._leases(workers, collate)) != "done":
        # There is nothing more before what is owed was acknowledged.
        dataset._consumed.pay()
        time.sleep(_AGAIN)
