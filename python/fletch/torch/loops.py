"""What a training loop iterates: leases from workers, in the order of the epoch, acknowledged one by one.

Invariants:
    1. A batch that was not handed to the loop is not acknowledged, and is held no longer than the loop.
    2. Where the order is known (all but ``substitute``), the loop gets it, with any number of workers.
    3. A worker lives until what it received is in the loop's hands: until then nobody else renews it.
"""

from __future__ import annotations

import inspect
import os
import time
import traceback
from collections import deque
from multiprocessing.connection import wait
from typing import Any, Callable, Generator, Iterator

import torch.utils.data

from .. import FletchError
from .epochs import EpochDataset
from .receive import Batch

#: A lock that is not free for so long, in seconds, has nobody who will give it back.
_STALE = 5.0

#: Between two answers of workers that have nothing more, in seconds.
_PAUSE = 0.01

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
        last = Batch(None, worker=worker, ended=True)
        try:
            for batch in self.dataset._leases(worker, self.collate, ahead):
                batch.worker = worker
                yield batch
        except FletchError as error:
            # Of one that a worker raises torch makes another, of its text: its code would be lost. Of others' classes nobody
            # knows whether they can be sent.
            if info is None or type(error).__module__ != FletchError.__module__:
                raise
            # Nor whether what somebody hung on it can be.
            last.error = type(error)(str(error), error.code, error.hint, error.retryable)
            last.error.add_note("".join([*getattr(error, "__notes__", []), f"in worker {worker}:\n{traceback.format_exc()}"]))
        # Torch ends a worker that has nothing more, whatever of it waits for the loop.
        while True:
            yield last


class _Loop(Iterator[Any]):
    """An iteration of a loader. A dataset has one at a time, the latest: they would take each other's batches."""

    def __init__(self, dataset: EpochDataset, made: Any, workers: int, collate: Any) -> None:
        self._job, self._made = dataset.job, made if workers else None
        self._batches = _steps(dataset, made, workers, collate)
        self._pid, self._replaced = os.getpid(), False

    def __next__(self) -> Any:
        if self._replaced:
            raise RuntimeError(
                f"job {self._job}: this iteration is over: another one of the same dataset began after it, or set_epoch() or "
                "load_state_dict() was called"
            )
        try:
            return next(self._batches)
        except BaseException as error:
            # A signal's, when the batch had left there and had not come here: the loop never gets it.
            if inspect.getgeneratorstate(self._batches) == inspect.GEN_SUSPENDED:
                self._batches.throw(error)
            raise

    def close(self) -> None:
        """Ends it and its workers. What is in hand stays so."""
        self._batches.close()
        if self._made is not None:
            # Where no batch was asked for, nobody else ends them.
            _shut(self._made)
            self._made = None

    def replace(self) -> None:
        """Another one begins. Who goes on with this one is told."""
        if self._pid != os.getpid():
            # After a fork it goes on where it began, with its workers.
            return
        state = inspect.getgeneratorstate(self._batches)
        if state == inspect.GEN_RUNNING:
            raise RuntimeError(f"job {self._job}: an iteration is being asked for a batch, by another thread or a transform")
        self._replaced = self._replaced or state != inspect.GEN_CLOSED
        self.close()


def _steps(
    dataset: EpochDataset, made: Iterator[Batch], workers: int, collate: Any
) -> Generator[Any, None, None]:
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
        dataset._consumed.hold_no_more()
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
    """What the workers made, until none has more. A worker that dies while its batch is being received breaks the connection on
    which the batch comes: that is reported as torch reports a worker that was found dead.
    """
    ended: set[int] = set()
    try:
        for batch in made:
            if batch.error is not None:
                raise batch.error
            if batch.worker in ended and not getattr(made, "_in_order", True):
                # Where torch waits for no worker in particular those that have nothing more answer at once, again and again.
                time.sleep(_PAUSE)
            yield batch
            if batch.ended:
                ended.add(batch.worker)
            if len(ended) == max(workers, 1):
                break
    except (OSError, EOFError) as error:
        # One that ended well did not break it.
        running = [w for w in made._workers if w.exitcode != 0] if workers else []  # type: ignore[attr-defined]
        dead = set(wait([w.sentinel for w in running], _DYING)) if running else set()
        if not dead:
            raise
        pids = ", ".join(str(w.pid) for w in running if w.sentinel in dead)
        raise RuntimeError(f"DataLoader worker (pid(s) {pids}) exited unexpectedly") from error
    if workers:
        # What they received was handed on.
        _shut(made)


def _all(dataset: EpochDataset, made: Iterator[Batch], workers: int, collate: Any) -> Iterator[Batch]:
    """What the workers made; and then what workers that died held, until nothing is left."""
    received = _received(made, workers)
    yield from _in_order(dataset, received, workers) if dataset._known and workers > 1 else received
    dataset._consumed.pay()
    waited = 0
    while (yield from dataset._leases(workers, collate)) != "done":
        # There is nothing more before what is owed was acknowledged.
        dataset._consumed.pay()
        waited += 1
        dataset._wait_for_others(waited)
