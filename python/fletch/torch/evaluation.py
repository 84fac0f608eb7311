"""Whole passes over a version, for validation, test and inference.

Invariants:
    1. Each iteration is one whole pass of this rank's share. It depends on the arguments only: not on earlier
       iterations, other processes or the server.
    2. Of one pass, each sample is on exactly one rank, and in exactly one worker of that rank. Only ``pad``
       repeats a sample, and marks it.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Sequence

import torch.utils.data

from .. import Client, Invalid, PendingRead, Sample
from ..epochs.contents import ContentForm, checked_content_form, nbytes_of
from ..epochs.drafts import resolve_sealed
from ..epochs.ranks import rank_of
from ..epochs.sample_errors import SKIP, ItemMaker, OnError, add_batch_note, checked_on_error, named
from .map import content_of_indexed
from .worker_table import WORKERS_MAX, _table
from .wrappers import refuse_sharders_of_passes

_log = logging.getLogger("fletch")

#: The samples that are read together if nobody names a batch size.
_TOGETHER = 64
#: The most bytes of one read of several samples.
_READ_BYTES_MAX = 64 << 20
#: The reads that are under way while the samples of an earlier one are prepared: in the process of the loop,
#: and in each worker, which prepares batches ahead of the loop in any case.
_READS_AHEAD, _READS_AHEAD_OF_WORKER = 2, 1

#: The columns of the table of counters.
_SAMPLES, _SKIPPED = range(2)


@dataclass(frozen=True)
class EvalSample:
    """A sample of a pass.

    Attributes:
        content: the view of the file, or a dict of views: as in `EpochSample`.
        path: the path of the sample's first file in the version.
        key: the sample's key; the path if the sample is one file.
        number: the sample's number in the version, from 0.
        ordinal: the ordinal of the sample's first entry. Root and ordinal identify the sample.
        repeated: the pass has this sample once more, on this rank or another one, and this one only makes the
            ranks' counts equal (``pad=True``). Leave it out of metrics and predictions.
    """

    content: Any
    path: str
    key: str
    number: int
    ordinal: int
    repeated: bool

    @property
    def nbytes(self) -> int:
        """The bytes of all files of the sample."""
        return nbytes_of(self.content)


class EvalDataset(torch.utils.data.IterableDataset[Any]):
    """The samples of a version in order, for validation, test and inference.

    Every ``for`` is one whole pass from its start: after a ``break``, an error, ``next(iter(loader))`` or a
    limit on the batches, in any process and after any restart. It declares no job, and leaves nothing on the
    server. For training use `EpochDataset`, whose iterations continue the epoch of a job.

    On several ranks each sample is on exactly one rank, and the ranks' counts differ by at most one. Each
    rank has neighbouring samples, in the version's order. `fletch.torch.DataLoader` yields them in that
    order, with any number of workers.

    A wrapper that divides the samples among the ranks itself, such as `Trainer` or ``accelerator.prepare``,
    needs the whole pass on every process: give ``rank=0, ranks=1``. It is an error to give it a part.

    Args:
        client: the client of the server.
        dataset: ``NAME[@TAG or ROOT]``, resolved once.
        batch_size: the samples that are read together. `fletch.torch.DataLoader` takes it as its own batch
            size, and gives its own in place of it. Under torch's own loader with workers, give the loader's
            batch size here: then only one batch of a pass is short, and ``len(loader)`` is exact.
        transform: makes an item of an `EvalSample`. Without it the item is the sample's ``content``.
        samples: whether a sample belongs to the pass, such as ``lambda sample:
            sample.key.startswith("val/")``; or the samples themselves. By default all samples.
        rank, ranks: this process's rank and the number of ranks. By default those of ``torch.distributed`` if
            it is initialised, else 0 and 1. If ``WORLD_SIZE`` names several ranks, one of the two is
            required.
        pad: give every rank the same number of samples, for loops whose collectives need equal counts. A rank
            that has one sample less repeats its first one, with ``repeated`` set.
        on_error: what happens if ``transform`` fails. ``"raise"``; ``"skip"``: the sample is left out,
            counted in `stats` and logged; or a callable of the error and the sample, which returns an item in
            its place or `fletch.torch.SKIP`. Errors name the sample. An error of Fletch that is retryable is
            always raised.
        content: ``"view"`` or ``"dict"``: the form of every content, as in `EpochDataset`.

    Attributes:
        version: the version that is read.
        root: the version's identity, 64 hex digits.

    Raises:
        NotFound: the dataset does not exist.
        Invalid: the settings are not valid, or no sample belongs to the pass.
    """

    def __init__(
        self,
        client: Client,
        dataset: str,
        *,
        batch_size: int | None = None,
        transform: Callable[[EvalSample], Any] | None = None,
        samples: Callable[[Sample], bool] | Sequence[Sample] | None = None,
        rank: int | None = None,
        ranks: int | None = None,
        pad: bool = False,
        on_error: OnError = "raise",
        content: ContentForm = None,
    ) -> None:
        self.rank, self.ranks = rank_of(rank, ranks)
        if batch_size is not None and batch_size < 1:
            raise Invalid(f"batch_size is {batch_size}; give at least 1")
        if pad and transform is None:
            raise Invalid(
                "pad=True repeats samples, and only a transform sees which: give a transform that returns "
                "sample.repeated with its result"
            )
        self.batch_size = batch_size
        self.transform = transform
        self.pad = pad
        self.on_error = checked_on_error(on_error)
        self.content = checked_content_form(content)
        self.version = resolve_sealed(client, dataset)
        self.root: str = self.version.root
        numbered = list(enumerate(self.version.samples()))
        if callable(samples):
            numbered = [(number, sample) for number, sample in numbered if samples(sample)]
        elif samples is not None:
            numbers = {sample.ordinals[0]: number for number, sample in numbered}
            foreign = [sample.key for sample in samples if sample.ordinals[0] not in numbers]
            if foreign:
                raise Invalid(f"sample {foreign[0]!r} of samples= is no sample of {self.version!r}")
            numbered = [(numbers[sample.ordinals[0]], sample) for sample in samples]
        total = len(numbered)
        if total == 0:
            raise Invalid(
                f"no sample of {self.version!r} belongs to the pass; `fletch ls` shows the version, and "
                "samples= chooses among its samples"
            )
        start, stop = (total * at // self.ranks for at in (self.rank, self.rank + 1))
        #: The samples of this rank with their numbers, without the one that pads.
        self._share = numbered[start:stop]
        #: The sample that pads, if there is one.
        self._padding = [numbered[start]] if pad and stop - start < -(-total // self.ranks) else []
        if stop == start and not pad:
            _log.warning(
                "%r has %d samples for %d ranks, so rank %d has none of them: give pad=True if the ranks "
                "wait for each other", self.version, total, self.ranks, self.rank,
            )
        #: The path, key, number and ordinal of each sample of the latest batch, for errors of its collation.
        self.recent: deque[tuple[str, str, int, int]] = deque(maxlen=1)
        #: One row for the process of the loop, and one for each worker.
        self._counts = _table(WORKERS_MAX + 1, 2)

    def __len__(self) -> int:
        """The samples of a pass of this rank, with the one that pads. Skipped samples count."""
        return len(self._share) + len(self._padding)

    def __getstate__(self) -> dict[str, Any]:
        refuse_sharders_of_passes(self.rank, self.ranks, len(self))
        return self.__dict__

    def __iter__(self) -> Iterator[Any]:
        """Iterates the items of one whole pass; in a worker those of this worker."""
        refuse_sharders_of_passes(self.rank, self.ranks, len(self))
        info = torch.utils.data.get_worker_info()
        if info is not None and info.num_workers > WORKERS_MAX:
            raise Invalid(f"a loader has {info.num_workers} workers; an EvalDataset allows {WORKERS_MAX}")
        return self._items(info)

    def of_batches(self, batch_size: int) -> EvalDataset:
        """A copy for one iteration of a loader with this batch size."""
        own = copy.copy(self)
        own.batch_size = batch_size
        own.recent = deque(maxlen=batch_size)
        return own

    def _items(self, info: Any) -> Iterator[Any]:
        maker = ItemMaker(self.transform, self.on_error)
        counts = self._counts[0 if info is None else info.id + 1]
        for sample in self._samples(info):
            item = maker.item(sample)
            if item is SKIP:
                counts[_SKIPPED] += 1
                continue
            counts[_SAMPLES] += 1
            self.recent.append((sample.path, sample.key, sample.number, sample.ordinal))
            yield item

    def _samples(self, info: Any) -> Iterator[EvalSample]:
        """The samples of this process, read in groups, some groups ahead."""
        ahead = _READS_AHEAD if info is None else _READS_AHEAD_OF_WORKER
        groups = self._groups(*((0, 1) if info is None else (info.id, info.num_workers)))
        reads: deque[tuple[list[tuple[int, Sample, bool]], PendingRead]] = deque()
        last: PendingRead | None = None
        more = True
        while more or reads:
            while more and len(reads) <= ahead:
                group = next(groups, None)
                if group is None:
                    more = False
                else:
                    ordinals = [o for _, sample, _ in group for o in sample.ordinals]
                    last = self.version.prefetch(ordinals, after=last)
                    reads.append((group, last))
            if reads:
                group, read = reads.popleft()
                views = iter(read.views())
                for number, sample, repeated in group:
                    yield self._sample(number, sample, repeated, views)

    def _groups(self, worker: int, workers: int) -> Iterator[list[tuple[int, Sample, bool]]]:
        """The samples of one worker, in groups that are read together.

        A worker has every ``workers``-th batch, because a loader takes a batch of each worker in turn.
        """
        size = self.batch_size or _TOGETHER
        total = len(self)
        for start in range(worker * size, total, workers * size):
            group: list[tuple[int, Sample, bool]] = []
            nbytes = 0
            for at in range(start, min(start + size, total)):
                repeated = at >= len(self._share)
                number, sample = self._padding[0] if repeated else self._share[at]
                more = sum(self.version.entry(ordinal).size for ordinal in sample.ordinals)
                if group and nbytes + more > _READ_BYTES_MAX:
                    yield group
                    group, nbytes = [], 0
                group.append((number, sample, repeated))
                nbytes += more
            yield group

    def _sample(self, number: int, sample: Sample, repeated: bool, views: Iterator[memoryview]) -> EvalSample:
        first = sample.ordinals[0]
        content = content_of_indexed(self.version, sample, views, self.content)
        path = sample.key if sample.single else self.version.entry(first).path
        return EvalSample(content, path, sample.key, number, first, repeated)

    def stats(self) -> dict[str, int]:
        """The counters since the dataset was made, of this process and its workers.

        Returns:
            A dict with ``samples``, the items that were prepared, and ``skipped``, the samples that
            ``on_error`` left out. Workers prepare batches ahead of the loop. If two iterations run at the
            same time, counts of the one may be lost.
        """
        samples, skipped = self._counts.sum(dim=0).tolist()
        return {"samples": samples, "skipped": skipped}

    def __repr__(self) -> str:
        return f"EvalDataset({self.version!r}, rank {self.rank} of {self.ranks}, {len(self)} samples)"


class CollateWithNames:
    """A ``collate_fn`` that calls another one. If it fails, the error names the samples of the batch.

    Args:
        collate: the ``collate_fn``.
        recent: the `recent` of the dataset whose items it gets, in the same process.
    """

    def __init__(self, collate: Callable[[Any], Any], recent: deque[tuple[str, str, int, int]]) -> None:
        self.collate, self.recent = collate, recent

    def __call__(self, items: list[Any]) -> Any:
        try:
            return self.collate(items)
        except Exception as error:
            add_batch_note(error, [named(*sample) for sample in self.recent][-len(items) :])
            raise
