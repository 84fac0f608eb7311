"""The loader: torch's own, which reads a whole batch at once."""

from __future__ import annotations

import atexit
import copy
import multiprocessing.util
import os
import signal
import weakref
from typing import Any, Callable, Iterator

import torch.utils.data
from torch.utils.data import Subset

from .epochs import EpochDataset
from .evaluation import CollateWithNames, EvalDataset
from .images import ImageFolder
from .iteration import _end_workers, _Iteration, _LeaseDataset
from .lease_journal import LeaseJournal, lease_journal
from .map import MapDataset
from .orphans import end_with_parent
from .prefetch import PrefetchSampler, can_prefetch
from .shared_buffers import IntoSharedBuffers, buffer_memory
from .wrappers import RebuiltLoader, refuse_repeated_batches

#: The default ``prefetch_factor`` with workers: torch's.
_PREFETCH_OF_WORKERS = 2
#: The default ``prefetch_factor`` without workers.
_PREFETCH_WITHOUT_WORKERS = 2


class DataLoader(torch.utils.data.DataLoader[Any]):
    """``torch.utils.data.DataLoader`` with the same arguments, which reads a whole batch in one request.

    For datasets of this package, and ``Subset``\\ s of them, the loader reads a batch with one call of the
    dataset, in every version of torch. Its attributes are those of torch's loader, so that frameworks can
    build another loader of them. Torch itself loads other datasets.

    Without workers the loader reads the bytes of the next ``prefetch_factor`` batches while the loop runs;
    the loop's own thread decodes them. The default is 2. With a sampler of the caller the default is 0,
    because prefetching asks the sampler earlier.

    For an `EpochDataset` a batch is a lease. The loader acknowledges it when the loop asks for the next
    batch, so each sample is delivered exactly once, with any number of workers. The batch size is the
    dataset's; ``shuffle``, samplers, ``drop_last`` and ``persistent_workers`` do not apply. If the loop
    leaves an iteration, the server delivers its unacknowledged samples again. A dataset has one iteration at
    a time: the next one ends the one before, and asking the ended one for a batch is a ``RuntimeError``. The
    loader has the dataset's ``state_dict`` and ``load_state_dict``, by which frameworks save it.

    For an `EvalDataset` the batch size is this loader's, or else the dataset's, and each iteration is a whole
    pass. Give such a dataset no ``shuffle`` and no samplers.

    Shapes are torch's: with the default ``collate_fn``, items of shape ``(…)`` make a batch of shape ``(n,
    …)``, where n is the batch size for all but the last batch.

    Workers ignore Ctrl-C. The process that iterates gets it and ends the workers in order, so that they
    remove their temporary files.
    """

    #: The number of batches that are prefetched without workers.
    _prefetched = 0
    #: Whether the dataset reads a batch by the list of its indices.
    _by_batch = False

    #: Those of the `EpochDataset`. A loader over another dataset has none of the two, so that frameworks do
    #: not take it for one whose position they can save.
    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], None]

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        generator: torch.Generator | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs["worker_init_fn"] = _WorkerInit(worker_init_fn) if num_workers else worker_init_fn
        self._epochs = dataset if isinstance(dataset, EpochDataset) else None
        self._collate = torch.utils.data.default_collate if collate_fn is None else collate_fn
        if self._epochs is not None:
            given = (shuffle, sampler, batch_sampler, drop_last, kwargs.get("persistent_workers"))
            if any(given) or batch_size not in (1, self._epochs.batch_size):
                refuse_repeated_batches(self._epochs.job)
                raise ValueError(
                    "an EpochDataset makes its own batches: give no batch_size, sampler, shuffle, drop_last "
                    "or persistent_workers"
                )
            self._epochs._check_held(num_workers, kwargs.get("prefetch_factor") or _PREFETCH_OF_WORKERS)
            super().__init__(
                # Wrappers see the caller's dataset. `_get_iterator` puts one of leases in its place.
                self._epochs,
                None,
                num_workers=num_workers,
                collate_fn=RebuiltLoader(),
                pin_memory=pin_memory,
                timeout=timeout,
                generator=generator,
                **kwargs,
            )
            self.state_dict, self.load_state_dict = self._epochs.state_dict, self._epochs.load_state_dict
            return
        if isinstance(dataset, EvalDataset):
            if dataset.batch_size is not None and batch_size not in (None, 1, dataset.batch_size):
                raise ValueError(
                    f"batch_size is {batch_size}, and that of the EvalDataset is {dataset.batch_size}: give "
                    "one of them"
                )
            if batch_size == 1:
                batch_size = dataset.batch_size or 1
        by_batch = _reads_batches(dataset) and (batch_size is not None or batch_sampler is not None)
        if by_batch:
            if batch_sampler is None:
                if sampler is not None and shuffle:
                    raise ValueError("both a sampler and shuffle=True are given; give one of them")
            elif batch_size != 1 or shuffle or sampler is not None or drop_last:
                raise ValueError(
                    "batch_sampler is given with batch_size, shuffle, sampler or drop_last; give "
                    "batch_sampler alone"
                )
            if num_workers == 0 and can_prefetch(dataset, (MapDataset, ImageFolder)):
                own = sampler is None and batch_sampler is None
                most = kwargs.pop("prefetch_factor", None)
                if most is not None and most < 0:
                    raise ValueError(f"prefetch_factor is {most}; it must be at least 0")
                self._prefetched = (_PREFETCH_WITHOUT_WORKERS if own else 0) if most is None else most
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            self._collate if by_batch else collate_fn,
            pin_memory,
            drop_last,
            timeout,
            generator=generator,
            **kwargs,
        )
        self._by_batch = by_batch

    @property
    def _index_sampler(self) -> Any:
        # Torch iterates this property. `sampler` stays unchanged.
        batches = super()._index_sampler
        return PrefetchSampler(batches, self.dataset, self._prefetched) if self._prefetched > 0 else batches

    #: The journal of the iteration that begins.
    _journal: LeaseJournal | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._epochs is not None:
            self._epochs._start_iteration()
        if self.num_workers:
            # Workers inherit this process's temporary directory, and this process removes it at its end. A
            # directory that a worker made for itself would stay if the worker were killed.
            multiprocessing.util.get_temp_dir()
        journal = None
        if self._epochs is not None:
            under_way = self.prefetch_factor or 0
            journal = lease_journal(self._epochs._acks, self._epochs.rank, self.num_workers, under_way)
        # `_get_iterator` gives it to the workers.
        self._journal = journal
        try:
            batches = super().__iter__()
        finally:
            self._journal = None
        if self.num_workers:
            _running.add(batches)
        if self._epochs is not None:
            made: Any = batches
            made._fletch_journal = journal
            iteration = _Iteration(self._epochs, batches, self.num_workers, self._collate)
            self._epochs._iteration = weakref.ref(iteration)
            return iteration
        return batches

    def _get_iterator(self) -> Any:
        # Torch calls this when it makes the workers, which get the loader's `collate_fn`.
        own = copy.copy(self)
        if self._epochs is not None:
            leases = _LeaseDataset(self._epochs, self._collate)
            leases.journal = self._journal
            own.__dict__["dataset"] = leases
            own.collate_fn = _identity
        if self._by_batch:
            # To torch's iterator a batch is an item, whose index is a list. Torch before 2.0 knows no other
            # way to read a batch at once.
            own.__dict__.update(sampler=self.batch_sampler, batch_sampler=None, batch_size=None)
        if isinstance(self.dataset, EvalDataset) and self.batch_size is not None:
            # `dataset` stays the caller's, for wrappers that make another loader of it.
            own.__dict__["dataset"] = dataset = self.dataset.of_batches(self.batch_size)
            own.collate_fn = CollateWithNames(self.collate_fn, dataset.recent)
        memory = buffer_memory(self.num_workers, self.prefetch_factor or 0) if self.num_workers else None
        if memory is not None:
            own.collate_fn = IntoSharedBuffers(own.collate_fn, memory)
        batches: Any = super(DataLoader, own)._get_iterator()
        if memory is not None:
            batches._fletch_buffers = memory
        return batches

    def __len__(self) -> int:
        return super().__len__() if self._epochs is None else self._epochs.steps


#: Iterations whose workers may run. When Python ends, for example after Ctrl-C, `_end` ends those that are
#: left. It runs before torch and multiprocessing terminate the workers, because a terminated worker leaves
#: its temporary directory.
_running: weakref.WeakSet[Any] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    for batches in list(_running):
        _end_workers(batches)
        if (journal := getattr(batches, "_fletch_journal", None)) is not None:
            journal.settle()


class _WorkerInit:
    """Makes a worker ignore Ctrl-C and end with its parent, then calls the user's ``worker_init_fn``."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self.then = then

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        end_with_parent()
        if self.then is not None:
            self.then(worker)


def _identity(batch: Any) -> Any:
    return batch


def _reads_batches(dataset: Any) -> bool:
    """Whether a dataset, or the dataset of a subset, reads a list of indices together."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return isinstance(dataset, (MapDataset, ImageFolder))
