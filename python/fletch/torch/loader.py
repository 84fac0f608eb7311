"""The loader: torch's own, reading a whole batch at once."""

from __future__ import annotations

import atexit
import multiprocessing.util
import signal
import weakref
from typing import Any, Callable, Iterator

import torch.utils.data
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler, Subset

from .epochs import EpochDataset
from .images import ImageFolder
from .loops import _Leases, _Loop, _shut
from .map import MapDataset
from .reads import Ahead, reads_ahead

#: Batches of a worker that wait for the loop, where nothing else says how many (torch's).
_PREFETCHED = 2
#: Batches that are read ahead without workers where nothing else says how many.
_AHEAD = 2


class DataLoader(torch.utils.data.DataLoader[Any]):
    """``torch.utils.data.DataLoader`` with the same arguments, which reads a batch in one go.

    For datasets of this package (and ``Subset``\\ s of them) a batch is one call of the dataset, so
    that its samples come in one request whatever torch's version is. To torch such a loader's
    unit is the batch: its ``batch_size`` attribute is ``None`` and its ``sampler`` yields batches.
    Other datasets are left to torch. Without workers the bytes of the next ``prefetch_factor`` batches are read while the loop
    runs; decoding stays in the loop's own thread. By default they are 2, or none with a sampler of the caller's, which is
    asked that much earlier.

    For an `EpochDataset` a batch is a lease, which travels with it from the worker and is acknowledged when the loop
    asks for the next batch: exactly once, with any number of workers. Its ``batch_size`` is the dataset's; ``shuffle``,
    samplers, ``drop_last`` and ``persistent_workers`` do not apply. An iteration that is broken off leaves its unacknowledged
    samples to be delivered again. A dataset has one iteration at a time: when another one begins, the one before is over, and
    asking it for more is a ``RuntimeError``.

    Shapes are torch's: with the default ``collate_fn`` items of shape ``(…)`` make a batch of shape ``(n, …)``, n being
    `batch_size` for all but the last batch.

    Workers ignore Ctrl-C: the process that iterates gets it and ends them in order, so that they
    remove what they made.
    """

    #: Batches that are read ahead of the loop.
    _ahead = 0

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
                raise ValueError(
                    "an EpochDataset brings its own batches: give no batch_size, sampler, shuffle, drop_last or"
                    " persistent_workers"
                )
            self._epochs._can_hold(num_workers, kwargs.get("prefetch_factor") or _PREFETCHED)
            super().__init__(
                _Leases(self._epochs, self._collate),
                None,
                num_workers=num_workers,
                collate_fn=_same,
                pin_memory=pin_memory,
                timeout=timeout,
                generator=generator,
                **kwargs,
            )
            return
        if not _batched(dataset) or (batch_size is None and batch_sampler is None):
            super().__init__(
                dataset,
                batch_size,
                shuffle,
                sampler,
                batch_sampler,
                num_workers,
                collate_fn,
                pin_memory,
                drop_last,
                timeout,
                generator=generator,
                **kwargs,
            )
            return
        own = sampler is None and batch_sampler is None
        if batch_sampler is None:
            if sampler is not None and shuffle:
                raise ValueError("give a sampler or shuffle=True, not both")
            batch_sampler = BatchSampler(
                _sampler(dataset, shuffle, generator) if sampler is None else sampler,
                batch_size or 1,
                drop_last,
            )
        elif batch_size != 1 or shuffle or sampler is not None or drop_last:
            raise ValueError("batch_sampler excludes batch_size, shuffle, sampler and drop_last")
        if num_workers == 0 and reads_ahead(dataset, (MapDataset, ImageFolder)):
            most = kwargs.pop("prefetch_factor", None)
            if most is not None and most < 0:
                raise ValueError(f"prefetch_factor is {most}; it must be at least 0")
            self._ahead = (_AHEAD if own else 0) if most is None else most
        super().__init__(
            dataset,
            None,
            None,
            batch_sampler,
            None,
            num_workers,
            self._collate,
            pin_memory,
            False,
            timeout,
            generator=generator,
            **kwargs,
        )

    @property
    def _index_sampler(self) -> Any:
        # What torch iterates: `sampler` stays what it was.
        batches = super()._index_sampler
        return Ahead(batches, self.dataset, self._ahead) if self._ahead > 0 else batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._epochs is not None:
            self._epochs._start()
        if self.num_workers:
            # Workers inherit the temporary directory that this process has, and this one removes it when it ends. One
            # that a worker makes for itself stays if the worker is ended before it got to its own end.
            multiprocessing.util.get_temp_dir()
        batches = super().__iter__()
        if self.num_workers:
            _running.add(batches)
        if self._epochs is not None:
            loop = _Loop(self._epochs, batches, self.num_workers, self._collate)
            self._epochs._loop = weakref.ref(loop)
            return loop
        return batches

    def __len__(self) -> int:
        return super().__len__() if self._epochs is None else self._epochs.steps


#: Iterations whose workers may run. Those that are still there when Python ends (after Ctrl-C, say) are
#: ended by `_end`, which runs before torch and multiprocessing give their workers up: those
#: terminate them, and a terminated worker leaves its temporary directory behind.
_running: weakref.WeakSet[Any] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    for batches in list(_running):
        _shut(batches)


class _WorkerInit:
    """What a worker does before anything else."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self.then = then

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self.then is not None:
            self.then(worker)


def _same(batch: Any) -> Any:
    return batch


def _sampler(dataset: Any, shuffle: bool | None, generator: torch.Generator | None) -> Sampler[int]:
    return RandomSampler(dataset, generator=generator) if shuffle else SequentialSampler(dataset)


def _batched(dataset: Any) -> bool:
    """Whether a dataset takes a list of indices and reads them together."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return isinstance(dataset, (MapDataset, ImageFolder))
