"""Prefetch without workers: reads the bytes of the next batches while the loop runs.

Invariant: prefetching does not change what a dataset returns. A batch that was prefetched and not asked for
    is dropped when
the loop passes it.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Callable, Iterator, Sequence

from torch.utils.data import Subset

from .. import PendingRead, Version

#: The key of a batch: a version, and the ordinals of its entries in order.
_BatchKey = tuple[Version, "tuple[int, ...]"]


class PendingReads:
    """The reads that were started for one dataset, oldest first.

    A copy, or another process, starts with none.
    """

    def __init__(self) -> None:
        self.pending: dict[_BatchKey, list[PendingRead]] = {}
        self._last: PendingRead | None = None

    def start(self, version: Version, ordinals: Sequence[int]) -> tuple[_BatchKey, PendingRead]:
        """Starts to read the entries of a batch that will be asked for after the earlier ones."""
        batch = (version, tuple(ordinals))
        self._last = read = version.prefetch(ordinals, after=self._last)
        self.pending.setdefault(batch, []).append(read)
        return batch, read

    def take(self, version: Version, ordinals: Sequence[int]) -> PendingRead | None:
        """Removes and returns the oldest read of this batch, if there is one."""
        batch = (version, tuple(ordinals))
        reads = self.pending.get(batch)
        if not reads:
            return None
        first = reads[0]
        self.drop(batch, first)
        return first

    def drop(self, batch: _BatchKey, read: PendingRead) -> None:
        """Removes a read, if it is still there."""
        reads = self.pending.get(batch, [])
        if read in reads:
            reads.remove(read)
        if not reads:
            self.pending.pop(batch, None)
        if read is self._last:
            self._last = None

    def __reduce__(self) -> tuple[Any, ...]:
        return PendingReads, ()


class IndexedReads:
    """Base of datasets by index: reads the entries of a batch of `version`, prefetched or now."""

    version: Version
    _pending: PendingReads | None = None

    def _entries_of(self, indices: Sequence[int]) -> list[int]:
        """The ordinals of the entries that a batch of indices reads, in order."""
        raise NotImplementedError

    def _prefetch(self, indices: Sequence[int]) -> Callable[[], None]:
        """Starts to read a batch. Returns a function that drops the read if it is not used."""
        pending = self._pending = self._pending or PendingReads()
        batch, read = pending.start(self.version, self._entries_of(indices))
        return lambda: pending.drop(batch, read)

    def _views(self, ordinals: Sequence[int]) -> list[memoryview]:
        """Whole files, in the order of ``ordinals``."""
        read = None if self._pending is None else self._pending.take(self.version, ordinals)
        return self.version.read_many(ordinals) if read is None else read.views()


class PrefetchSampler:
    """Yields a sampler's batches of indices, and prefetches the ``most`` batches after the yielded one."""

    def __init__(self, batches: Any, dataset: Any, most: int) -> None:
        self.batches, self.dataset, self.most = batches, dataset, most

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        started: deque[tuple[Any, Callable[[], None]]] = deque()
        batches, more = iter(self.batches), True
        failed: Exception | None = None
        try:
            while more or started:
                try:
                    while more and len(started) <= self.most:
                        indices = next(batches)
                        started.append((indices, self._start(indices)))
                except StopIteration:
                    more = False
                except Exception as error:
                    # The sampler's error comes after the batches that it yielded.
                    more, failed = False, error
                if started:
                    yield started[0][0]
                    started.popleft()[1]()
            if failed is not None:
                raise failed
        finally:
            for _, drop in started:
                drop()

    def _start(self, indices: Any) -> Callable[[], None]:
        """Starts to read a batch. Returns a function that drops the read."""
        dataset: Any = self.dataset
        try:
            below = list(indices)
            while type(dataset) is Subset:
                below = [dataset.indices[i] for i in below]
                dataset = dataset.dataset
            drop: Callable[[], None] = dataset._prefetch(below)
        except Exception:
            # The loop gets the error when it asks for the batch.
            return lambda: None
        return drop


def can_prefetch(dataset: Any, classes: Sequence[type[IndexedReads]]) -> bool:
    """Whether a dataset, or the dataset of a subset, reads a batch as one of these classes does.

    A subclass that overrides how it reads cannot be prefetched.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    read = ("__getitem__", "__getitems__", "_entries_of")
    return any(all(getattr(type(dataset), r, None) is getattr(kind, r) for r in read) for kind in classes)
