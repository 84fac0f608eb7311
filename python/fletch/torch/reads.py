"""Batches whose bytes are on their way before the loop asks for them.

Invariant: what a dataset returns does not depend on what was begun ahead; what was begun and not asked for is given up
when its turn is over.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Callable, Iterator, Sequence

from torch.utils.data import Subset

from .. import Reading, Version

#: What identifies a batch: a version, and which of its entries in which order.
_Batch = tuple[Version, "tuple[int, ...]"]


class Reads:
    """What was begun for one dataset, oldest first. A copy, or another process, begins with nothing."""

    def __init__(self) -> None:
        self.begun: dict[_Batch, list[Reading]] = {}
        self._last: Reading | None = None

    def begin(self, version: Version, ordinals: Sequence[int]) -> tuple[_Batch, Reading]:
        """These will be asked for, after what was begun before."""
        batch = (version, tuple(ordinals))
        self._last = reading = version.read_ahead(ordinals, after=self._last)
        self.begun.setdefault(batch, []).append(reading)
        return batch, reading

    def take(self, version: Version, ordinals: Sequence[int]) -> Reading | None:
        """What was begun of these, if anything was."""
        batch = (version, tuple(ordinals))
        readings = self.begun.get(batch)
        if not readings:
            return None
        first = readings[0]
        self.give_up(batch, first)
        return first

    def give_up(self, batch: _Batch, reading: Reading) -> None:
        """It is not needed any more, if it still was."""
        readings = self.begun.get(batch, [])
        if reading in readings:
            readings.remove(reading)
        if not readings:
            self.begun.pop(batch, None)
        if reading is self._last:
            self._last = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Reads, ()


class ByIndex:
    """What datasets by index have in common: `version`, which is read, and how."""

    version: Version
    _reads: Reads | None = None

    def _entries_of(self, indices: Sequence[int]) -> list[int]:
        """The entries that a batch of indices reads, in the order in which it does."""
        raise NotImplementedError

    def _begin(self, indices: Sequence[int]) -> Callable[[], None]:
        """Begins to read for a batch that will be asked for; what gives it up, if it was not."""
        reads = self._reads = self._reads or Reads()
        batch, reading = reads.begin(self.version, self._entries_of(indices))
        return lambda: reads.give_up(batch, reading)

    def _views(self, ordinals: Sequence[int]) -> list[memoryview]:
        """Whole files, in the order asked."""
        begun = None if self._reads is None else self._reads.take(self.version, ordinals)
        return self.version.read_many(ordinals) if begun is None else begun.views()


class Ahead:
    """Batches of indices of a sampler. Those of the ``most`` after the one that is handed on are being read."""

    def __init__(self, batches: Any, dataset: Any, most: int) -> None:
        self.batches, self.dataset, self.most = batches, dataset, most

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        begun: deque[tuple[Any, Callable[[], None]]] = deque()
        batches, more = iter(self.batches), True
        failed: Exception | None = None
        try:
            while more or begun:
                try:
                    while more and len(begun) <= self.most:
                        indices = next(batches)
                        begun.append((indices, self._begin(indices)))
                except StopIteration:
                    more = False
                except Exception as error:
                    # What the sampler raised comes after the batches that it gave.
                    more, failed = False, error
                if begun:
                    yield begun[0][0]
                    begun.popleft()[1]()
            if failed is not None:
                raise failed
        finally:
            for _, give_up in begun:
                give_up()

    def _begin(self, indices: Any) -> Callable[[], None]:
        """Begins to read a batch; what gives it up."""
        dataset: Any = self.dataset
        try:
            below = list(indices)
            while type(dataset) is Subset:
                below = [dataset.indices[i] for i in below]
                dataset = dataset.dataset
            give_up: Callable[[], None] = dataset._begin(below)
        except Exception:
            # What is wrong with the batch, or with its server, is said when it is asked for.
            return lambda: None
        return give_up


def reads_ahead(dataset: Any, known: Sequence[type[ByIndex]]) -> bool:
    """Whether it is known what a dataset reads for a batch: it is one of those kinds, or a subset of one, and reads as they do."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    read = ("__getitem__", "__getitems__", "_entries_of")
    return any(all(getattr(type(dataset), r, None) is getattr(kind, r) for r in read) for kind in known)
