"""The table with which workers of torch's own loader agree on an epoch, and report what they consumed.

Torch does not call the process that made the workers when an iteration begins. So the workers agree among
themselves which epoch the iteration reads. They share a table of numbers with one row for each worker. No
worker waits for another, and a worker that is killed does not block the others.

Invariants:
    1. All workers of an iteration read the same epoch. The first one chooses it; the others find its choice,
       or choose the same.
    2. Only the worker of that number writes a row. A reader always gets a complete copy of its counts.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Callable, NamedTuple

import torch

from .. import Invalid

_log = logging.getLogger("fletch")

#: The most workers of one loader.
WORKERS_MAX = 128

#: The number of iterations in the table: the latest, the next one, and older ones that workers may still run.
_ITERATIONS = 8

#: The pause between two looks at the other workers' rows, in seconds.
_POLL_SECONDS = 0.01

#: The seed of an iteration that the process which made the workers wrote. Torch never uses it.
_NO_SEED = -1

# The columns of a row before its two copies of the counts.
_STARTED, _ENDED, _EPOCH, _WRITES, _HEAD = range(5)


class Iteration(NamedTuple):
    """One pass of workers over an epoch, or over the rest of an epoch."""

    number: int
    #: The base seed that torch gives the workers of one loader, and the number of iterations that each worker
    #: began. The two are the same in all workers, and never occur again.
    seed: int
    turn: int
    epoch: int
    workers: int
    over: bool


class WorkerTable:
    """The shared table. A process that gets it by a fork or from torch sees the same numbers.

    Args:
        epoch: the first epoch.
        counts: the number of counters of what a worker consumed.
        sum_bytes: the length of a receipt sum in bytes, a multiple of 8.
    """

    def __init__(self, epoch: int, counts: int, sum_bytes: int) -> None:
        self._counts = counts
        self._copy = counts + sum_bytes // 8
        self._rows = _table(WORKERS_MAX, _HEAD + 2 * self._copy)
        self._iterations = _table(_ITERATIONS, 5)
        #: The number of the latest iteration, and of the first one whose counts belong to the current epoch.
        self._numbers = _table(2)
        self.set_epoch(epoch)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # Torch passes the table itself to its workers. A copy that is made in another way is a separate
        # table.
        for table in (self._rows, self._iterations, self._numbers):
            _share(table)

    # Methods of the process that made the workers. It calls them while no worker runs.

    def set_epoch(self, epoch: int, over: bool = False) -> None:
        """Makes the next iteration read this epoch from the start; with ``over`` the one after it."""
        number = int(self._numbers[0]) + 1
        self._write_iteration(Iteration(number, _NO_SEED, 0, epoch, 0, over))
        if not over:
            self._numbers[1] = number

    def is_unused(self) -> bool:
        """Whether no worker began an iteration, and no epoch was chosen or ended, since this was made."""
        return int(self._numbers[0]) == 1

    def has_run(self, but_for: int | None) -> bool:
        """Whether workers began an iteration, other than those of the loader with this base seed."""
        latest, ended = int(self._numbers[0]), self._rows[:, _ENDED].clone()
        numbers = range(max(latest - _ITERATIONS + 1, 1), latest + 1)
        iterations = [self._read_iteration(number, ended) for number in numbers]
        return any(one.workers > 0 and one.seed != but_for for one in iterations)

    def latest(self) -> Iteration:
        """The latest iteration. It is over if all its workers reached the end."""
        ended = self._rows[:, _ENDED].clone()
        return self._read_iteration(int(self._numbers[0]), ended)

    def consumed(self) -> tuple[list[int], list[bytes]]:
        """The workers' counters of the latest epoch since `set_epoch`, and each worker's receipt sum."""
        latest, since = self.latest(), int(self._numbers[1])
        counts, sums = [0] * self._counts, []
        of_epoch = (self._rows[:, _STARTED] > since) & (self._rows[:, _EPOCH] == latest.epoch)
        for worker in of_epoch.nonzero().flatten().tolist():
            more, total = self._read_copy(self._rows[worker])
            counts = [a + b for a, b in zip(counts, more)]
            sums.append(total)
        return counts, sums

    # Methods of a worker.

    def join(
        self, info: Any, turn: int, finished: Callable[[int], bool]
    ) -> tuple[int, list[int], bytes | None]:
        """Begins the `turn`-th iteration of this loader in this worker.

        Args:
            info: the result of ``torch.utils.data.get_worker_info()``.
            turn: the number of iterations that this worker began.
            finished: returns whether the server has finished an epoch.

        Returns:
            The epoch; and what workers of this number consumed of it before: counters, and the receipt sum if
            there is one.

        Raises:
            Invalid: the loader has too many workers.
        """
        if info.num_workers > WORKERS_MAX:
            raise Invalid(f"the loader has {info.num_workers} workers; over epochs it can have {WORKERS_MAX}")
        row, seed = self._rows[info.id], info.seed - info.id
        mine = self._find(row, seed, turn, info.num_workers)
        if mine is None:
            # First read whether the latest epoch is over, then check again whether another worker began this
            # iteration. If none did, no worker read anything since, and every worker that gets here makes the
            # same choice.
            latest = self.latest()
            # If the process that made the workers named the epoch, read that epoch even if it is finished.
            over = latest.over or (latest.workers > 0 and finished(latest.epoch))
            mine = self._find(row, seed, turn, info.num_workers)
            if mine is None:
                epoch = latest.epoch + int(over)
                mine = Iteration(latest.number + 1, seed, turn, epoch, info.num_workers, False)
                self._write_iteration(mine)
        continues = int(row[_STARTED]) > int(self._numbers[1]) and int(row[_EPOCH]) == mine.epoch
        counts, total = self._read_copy(row) if continues else ([0] * self._counts, None)
        if not continues:
            self._write_copy(row, torch.zeros(self._copy, dtype=torch.int64))
        row[_EPOCH] = mine.epoch
        row[_STARTED] = mine.number
        return mine.epoch, counts, total

    def _find(self, row: torch.Tensor, seed: int, turn: int, workers: int) -> Iteration | None:
        """The iteration of this seed and turn, if a worker began it and this worker did not run it before."""
        ended = self._rows[:, _ENDED].clone()
        latest = int(self._numbers[0])
        for number in range(latest, max(latest - _ITERATIONS + 1, 0), -1):
            one = self._read_iteration(number, ended)
            if one[1:3] == (seed, turn) and one.workers == workers:
                return None if one.over or number == int(row[_STARTED]) else one
        return None

    def publish(self, worker: int, counts: list[int], total: bytes) -> None:
        """Publishes what this worker consumed of its epoch so far."""
        words = torch.frombuffer(bytearray(total), dtype=torch.int64)
        self._write_copy(self._rows[worker], torch.cat((torch.tensor(counts, dtype=torch.int64), words)))

    def end(self, worker: int) -> None:
        """Records that this worker has nothing left in its iteration."""
        row = self._rows[worker]
        row[_ENDED] = row[_STARTED]

    def got_nothing(self, seconds: float) -> bool:
        """Whether no worker got a sample of the epoch.

        A worker publishes what it consumed a moment after the server knows it. So this waits until all
        workers of the iteration ended, or for ``seconds``.
        """
        until = time.monotonic() + seconds
        while not any(self.consumed()[0]):
            if self.latest().over or time.monotonic() >= until:
                return not any(self.consumed()[0])
            time.sleep(_POLL_SECONDS)
        return False

    # The layout of the table.

    def _write_iteration(self, one: Iteration) -> None:
        """Makes this iteration the latest. Its fields are written before its number."""
        self._iterations[one.number % _ITERATIONS] = torch.tensor([int(field) for field in one[1:]])
        self._numbers[0] = one.number

    def _read_iteration(self, number: int, ended: torch.Tensor) -> Iteration:
        """The iteration of this number.

        ``ended`` has the number of the last iteration that each worker ended.
        """
        seed, turn, epoch, workers, over = self._iterations[number % _ITERATIONS].tolist()
        all_ended = workers > 0 and bool((ended[:workers] == number).all())
        return Iteration(number, seed, turn, epoch, workers, bool(over) or all_ended)

    def _write_copy(self, row: torch.Tensor, values: torch.Tensor) -> None:
        """Writes the copy that nobody reads now, then makes it the current one."""
        writes = int(row[_WRITES]) + 1
        start = _HEAD + writes % 2 * self._copy
        row[start : start + self._copy] = values
        row[_WRITES] = writes

    def _read_copy(self, row: torch.Tensor) -> tuple[list[int], bytes]:
        """The counters and the receipt sum that were written last."""
        while True:
            writes = int(row[_WRITES])
            start = _HEAD + writes % 2 * self._copy
            copy = row[start : start + self._copy].clone()
            if int(row[_WRITES]) == writes:
                return copy[: self._counts].tolist(), bytes(copy[self._counts :].view(torch.uint8).tolist())


def _table(*shape: int) -> torch.Tensor:
    return _share(torch.zeros(shape, dtype=torch.int64))


def _share(table: torch.Tensor) -> torch.Tensor:
    """Moves the table to shared memory.

    Without shared memory a process cannot have workers, so it stays as it is.
    """
    try:
        table.share_memory_()
    except (OSError, RuntimeError) as error:
        _log.info("no shared memory for the table of workers, so they cannot report progress: %s", error)
    return table
