"""Epochs under torch's own loader: what its workers tell each other, and the process that made them.

Torch asks nothing of that process when an iteration begins, so its workers find out among themselves which epoch it is
of. They share a table of numbers, a row each; nobody waits for anybody, and one that is killed holds nobody up.

Invariants:
    1. Workers of one iteration read one epoch. Whoever comes first says which; who comes meanwhile says the same.
    2. A row has one writer, the worker of that number; what is read of it is whole.
"""

from __future__ import annotations

import logging
from typing import Any, Callable, NamedTuple

import torch

from .. import Invalid

_log = logging.getLogger("fletch")

#: More workers than that are refused.
WORKERS_MAX = 128

#: Iterations that are remembered: the latest, one that is about to be, and what workers may still be at that were left.
_REMEMBERED = 8

#: A seed that torch gives no iteration: the process that made the workers says where it is.
_NOBODY = -1

# What a row is before its two copies of what was consumed.
_STARTED, _ENDED, _EPOCH, _TURN, _HEAD = range(5)


class Iteration(NamedTuple):
    """One way through an epoch, or what is left of it."""

    number: int
    #: What torch gives the workers of one loader, and how often each of them began: the same in all of them, and never again.
    seed: int
    turn: int
    epoch: int
    workers: int
    over: bool


class Shared:
    """The table. It is the same one in every process that got it by a fork or from torch.

    Args:
        epoch: the first epoch.
        counts: how many numbers count what was consumed.
        sum_bytes: length of a sum of receipts, a multiple of 8.
    """

    def __init__(self, epoch: int, counts: int, sum_bytes: int) -> None:
        self._counts = counts
        self._copy = counts + sum_bytes // 8
        self._rows = _table(WORKERS_MAX, _HEAD + 2 * self._copy)
        self._iterations = _table(_REMEMBERED, 5)
        #: The latest iteration, and the one since which what is consumed counts.
        self._numbers = _table(2)
        self.at(epoch)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # Torch hands the table itself to its workers; a copy made in any other way is a table of its own.
        for table in (self._rows, self._iterations, self._numbers):
            _share(table)

    # What the process that made the workers does, while none of them runs.

    def at(self, epoch: int, over: bool = False) -> None:
        """The next iteration is of this epoch, and nothing was consumed of it; or, if it is `over`, of the one after it."""
        number = int(self._numbers[0]) + 1
        self._propose(Iteration(number, _NOBODY, 0, epoch, 0, over))
        if not over:
            self._numbers[1] = number

    def latest(self) -> Iteration:
        """The latest iteration. It is over when all its workers came to their ends."""
        ended = self._rows[:, _ENDED].clone()
        return self._read(int(self._numbers[0]), ended)

    def consumed(self) -> tuple[list[int], list[bytes]]:
        """What workers consumed of the latest epoch since `at`: the numbers that count it, and the sums of each worker."""
        latest, since = self.latest(), int(self._numbers[1])
        counts, sums = [0] * self._counts, []
        of_it = (self._rows[:, _STARTED] > since) & (self._rows[:, _EPOCH] == latest.epoch)
        for worker in of_it.nonzero().flatten().tolist():
            told, total = self._whole(self._rows[worker])
            counts = [a + b for a, b in zip(counts, told)]
            sums.append(total)
        return counts, sums

    # What a worker does.

    def join(
        self, info: Any, turn: int, finished: Callable[[int], bool]
    ) -> tuple[int, list[int], bytes | None]:
        """An iteration begins in this worker (`torch.utils.data.get_worker_info`), the `turn`-th of this loader.

        Args:
            finished: whether nothing is left of an epoch, as the server says.

        Returns:
            The epoch, and what workers of this number consumed of it before: counts, and the sum if there is one.
        """
        if info.num_workers > WORKERS_MAX:
            raise Invalid(f"{info.num_workers} workers are too many for one loader: at most {WORKERS_MAX}")
        row, seed = self._rows[info.id], info.seed - info.id
        mine = self._begun(row, seed, turn, info.num_workers)
        if mine is None:
            # First who ended and what is left, then whether another worker began this iteration meanwhile: if not, nobody
            # read anything since, and all who come here say the same.
            latest = self.latest()
            # An epoch that the process which made the workers named is that one, whatever is left of it.
            over = latest.over or (latest.workers > 0 and finished(latest.epoch))
            mine = self._begun(row, seed, turn, info.num_workers)
            if mine is None:
                epoch = latest.epoch + int(over)
                mine = Iteration(latest.number + 1, seed, turn, epoch, info.num_workers, False)
                self._propose(mine)
        goes_on = int(row[_STARTED]) > int(self._numbers[1]) and int(row[_EPOCH]) == mine.epoch
        counts, total = self._whole(row) if goes_on else ([0] * self._counts, None)
        if not goes_on:
            self._tell(row, torch.zeros(self._copy, dtype=torch.int64))
        row[_EPOCH] = mine.epoch
        row[_STARTED] = mine.number
        return mine.epoch, counts, total

    def _begun(self, row: torch.Tensor, seed: int, turn: int, workers: int) -> Iteration | None:
        """The iteration of this seed and turn, if a worker began it and it is not one that this worker had before."""
        ended = self._rows[:, _ENDED].clone()
        latest = int(self._numbers[0])
        for number in range(latest, max(latest - _REMEMBERED + 1, 0), -1):
            one = self._read(number, ended)
            if one[1:3] == (seed, turn) and one.workers == workers:
                return None if one.over or number == int(row[_STARTED]) else one
        return None

    def publish(self, worker: int, counts: list[int], total: bytes) -> None:
        """What this worker consumed of its epoch so far."""
        words = torch.frombuffer(bytearray(total), dtype=torch.int64)
        self._tell(self._rows[worker], torch.cat((torch.tensor(counts, dtype=torch.int64), words)))

    def end(self, worker: int) -> None:
        """Nothing is left for this worker in its iteration, and nothing comes again."""
        row = self._rows[worker]
        row[_ENDED] = row[_STARTED]

    # How it is kept.

    def _propose(self, one: Iteration) -> None:
        """The latest iteration is this one. What is said of it is there before its number is."""
        self._iterations[one.number % _REMEMBERED] = torch.tensor([int(said) for said in one[1:]])
        self._numbers[0] = one.number

    def _read(self, number: int, ended: torch.Tensor) -> Iteration:
        """An iteration, where workers have ended those."""
        seed, turn, epoch, workers, over = self._iterations[number % _REMEMBERED].tolist()
        all_ended = workers > 0 and bool((ended[:workers] == number).all())
        return Iteration(number, seed, turn, epoch, workers, bool(over) or all_ended)

    def _tell(self, row: torch.Tensor, what: torch.Tensor) -> None:
        """Writes the copy that nobody reads, and then says that it is the one to read."""
        turn = int(row[_TURN]) + 1
        start = _HEAD + turn % 2 * self._copy
        row[start : start + self._copy] = what
        row[_TURN] = turn

    def _whole(self, row: torch.Tensor) -> tuple[list[int], bytes]:
        """What was told last."""
        while True:
            turn = int(row[_TURN])
            start = _HEAD + turn % 2 * self._copy
            copy = row[start : start + self._copy].clone()
            if int(row[_TURN]) == turn:
                return copy[: self._counts].tolist(), bytes(copy[self._counts :].view(torch.uint8).tolist())


def _table(*shape: int) -> torch.Tensor:
    return _share(torch.zeros(shape, dtype=torch.int64))


def _share(table: torch.Tensor) -> torch.Tensor:
    """The same table; other processes see it, unless there is no shared memory: then there are no workers, either."""
    try:
        table.share_memory_()
    except (OSError, RuntimeError) as error:
        _log.info("workers cannot say how far they are: %s", error)
    return table
