"""Leases as batches: the code of the process that receives samples, a worker or the training process.

Invariant: a batch is one lease, from the worker that receives it to the ack of the training process.
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable, Generator, Iterator

from .. import FletchError, _native
from . import loaded_torch
from .contents import ContentForm, content_of, nbytes_of
from .sample_errors import SKIP, ItemMaker, OnError, add_batch_note, name_of
from .sample_keys import SampleKeys
from .sample_seeds import SampleSeeds, seed_generators, seeded
from .server_wait import Report, Stalls, wait_for_server

_log = logging.getLogger("fletch")

#: The leases that a worker asks for ahead of the one that it prepares.
_LEASES_AHEAD = 2

#: The seconds for which a process waits until the server knows of the leases that it dropped. After that it
#: goes on, and leases of which the server does not know expire.
_SETTLE_SECONDS = 1.0


@dataclass(frozen=True)
class EpochSample:
    """A sample of an epoch, as the server leased it.

    Attributes:
        content: a read-only ``memoryview`` of the file, of format ``B`` and shape ``(bytes,)``. For members
            of a tar shard, and for several files: a dict of such views by extension (in lower case), with the
            key as ``"__key__"``. The argument ``content=`` chooses one of the two for all samples.
        path: the path of the sample's first file in the version.
        number: the sample's number in the version, from 0.
        ordinal: the ordinal of the sample's first entry. Root and ordinal identify the sample.
        copy: the number of this copy of the sample, from 0; ``None`` for a copy that only pads a last step.
        seed: a number that depends on the job's seed, the epoch, and this copy of the sample only. The
            generators of ``random``, numpy and torch have it when ``transform`` is called. Give it to
            generators of your own.
        key: the sample's key; the path if each file is a sample by itself.
    """

    content: Any
    path: str
    number: int
    ordinal: int
    copy: int | None
    seed: int = 0
    key: str = ""

    @property
    def nbytes(self) -> int:
        """The bytes of all files of the sample."""
        return nbytes_of(self.content)


@dataclass
class Batch:
    """A lease on its way from the worker to the loop. Without a token it says that no lease was available."""

    token: tuple[int, int, int, int, int] | None
    deliveries: bytes = b""
    #: What the server granted, for the process that acknowledges it. Empty if the server is alone.
    grant: bytes = b""
    nbytes: int = 0
    #: Bytes of it that another job, or an earlier epoch, had brought to the server.
    shared: int = 0
    #: The time in which the worker waited for the lease, until its last byte was there. ``None``: unknown.
    received_ns: int | None = None
    prepared_ns: int = 0
    stalls: Stalls = field(default_factory=list)
    content: Any = None
    #: Its samples that ``on_error`` left out.
    skipped: int = 0
    #: All of them were left out, so there is nothing for the loop.
    is_empty: bool = False
    #: The worker that received it.
    worker: int = 0
    #: The worker has nothing more.
    ended: bool = False
    #: The error with which the worker ended.
    error: FletchError | None = None

    @property
    def lease(self) -> int:
        """The lease's number. The leases of an epoch are numbered in the order in which they are granted."""
        return 0 if self.token is None else self.token[2]

    @property
    def held(self) -> tuple[int, int, int, int, int]:
        """The token of a batch that has one."""
        assert self.token is not None
        return self.token

    def pin_memory(self) -> Batch:
        """Pins the content. Torch's function of this name calls it for ``pin_memory=True``."""
        self.content = sys.modules["torch.utils.data._utils.pin_memory"].pin_memory(self.content)
        return self


@dataclass(frozen=True)
class Receiver:
    """Receives the leases of one rank of an epoch, and makes items of their samples.

    Attributes:
        job: the job.
        name: the job's name.
        epoch: the epoch's number.
        rank: the rank whose leases it receives.
        size: the most samples of a lease.
        keys: finds the samples' keys.
        content: which form the samples' contents have.
        transform: makes an item of a sample.
        on_error: what happens if ``transform`` fails.
        seed: the job's seed.
        gives_samples: an item is the sample itself, with its seed. Then there is no ``transform``.
        server_wait: the longest wait for a server that is gone, in seconds; or ``None``.
    """

    job: _native.Job
    name: str
    epoch: int
    rank: int
    size: int
    keys: SampleKeys
    content: ContentForm
    transform: Callable[[EpochSample], Any] | None
    on_error: OnError
    seed: int
    gives_samples: bool
    server_wait: float | None

    def leases(
        self,
        worker: int,
        collate: Callable[[list[Any]], Any],
        prefetch: bool = False,
        journal: tuple[int, int, int] | None = None,
        releases_failed: bool = True,
    ) -> Generator[Batch, None, str]:
        """Yields the leases of one worker until none is left.

        Yields an empty batch if no lease is available now. Returns ``"done"`` if the epoch is finished, and
        ``"last"`` if other processes hold what is left of it.

        Args:
            worker: the worker's number.
            collate: makes a batch of a list of items.
            prefetch: receive the next leases while the caller uses the last one. Only for a caller that takes
                every lease to the end and waits for no other process in between.
            journal: the slots that list the leases, for a process that may outlive this one.
            releases_failed: whether a lease at which ``transform`` fails comes back at once. Otherwise it
                comes back when it expires.
        """
        params = (self.epoch, self.rank, worker, _LEASES_AHEAD if prefetch else 0, journal)
        reader, stalls = self._wait(lambda _: self.job.reader(*params))
        try:
            return (yield from self._received(reader, collate, stalls, releases_failed))
        finally:
            reader.close()
            # A worker ends now. The server must know of the leases that it did not hand out.
            self.job.settle(_SETTLE_SECONDS)

    def _received(
        self,
        reader: _native.Reader,
        collate: Callable[[list[Any]], Any],
        stalls: Stalls,
        releases_failed: bool,
    ) -> Generator[Batch, None, str]:
        skipped = 0
        seeds = SampleSeeds(self.seed, self.epoch)
        while True:
            next_lease = partial(reader.next, self.size)
            asked = time.monotonic_ns()
            (status, received), waits = self._wait(next_lease)
            received_ns = time.monotonic_ns() - asked - sum(end - start for start, end in waits)
            stalls += waits
            if status in ("last", "done"):
                return str(status)
            if received is None:
                yield Batch(None)
                continue
            token, leased, deliveries, grant = received
            begun = time.monotonic_ns()
            try:
                keys, waits = self._wait(lambda _: self._find_keys(leased))
                stalls += waits
                samples = [self._sample(one, key, seeds) for one, key in zip(leased, keys)]
                nbytes = sum(sample.nbytes for sample in samples)
                maker = ItemMaker(self.transform, self.on_error, skipped)
                count, collated = self._made(samples, maker, collate, seeds)
            except BaseException:
                # The loop never gets this batch, so the server may deliver it again.
                if releases_failed:
                    self.job.drop_lease(token)
                else:
                    self.job.forget_lease(token)
                raise
            prepared = time.monotonic_ns() - begun - sum(end - start for start, end in waits)
            shared = sum(one.shared for one in leased)
            left_out, skipped = maker.skipped - skipped, maker.skipped
            measured = (nbytes, shared, received_ns, prepared, stalls)
            yield Batch(token, deliveries, grant, *measured, collated, left_out, count == 0)
            stalls = []

    def _made(
        self,
        samples: list[EpochSample],
        maker: ItemMaker,
        collate: Callable[[list[Any]], Any],
        seeds: SampleSeeds,
    ) -> tuple[int, Any]:
        """The number of samples that are not skipped, and what ``collate`` makes of their items."""
        if self.gives_samples:
            return len(samples), collate(samples)
        items, collated = _made(samples, maker, collate, seeds)
        return len(items), collated

    def _wait(self, call: Callable[[Report], Any]) -> tuple[Any, Stalls]:
        return wait_for_server(f"job {self.name}, epoch {self.epoch}", call, self.server_wait)

    def _find_keys(self, leased: list[_native.Leased]) -> list[tuple[str, bool]]:
        return [self.keys.of(one.paths[0], one.ordinal) for one in leased]

    def _sample(self, leased: _native.Leased, found: tuple[str, bool], seeds: SampleSeeds) -> EpochSample:
        (key, is_keyed), paths = found, leased.paths
        number, copy = leased.number, leased.copy
        content = content_of(self.content, key, is_keyed, paths, leased.views())
        is_seen = self.gives_samples or self.transform is not None
        seed = seeds.of_sample(number, copy) if is_seen else 0
        return EpochSample(content, paths[0], number, leased.ordinal, copy, seed, key)


def _made(
    samples: list[EpochSample], maker: ItemMaker, collate: Callable[[list[Any]], Any], seeds: SampleSeeds
) -> tuple[list[tuple[EpochSample, Any]], Any]:
    """The samples that are not skipped, with their items; and what ``collate`` makes of the items."""
    # These two functions draw no number.
    if maker.transform is None and collate in (list, loaded_torch.default_collate()):
        items = [(sample, sample.content) for sample in samples]
        return items, _collated(collate, items)
    with seeded():
        items = list(_items(maker, samples))
        seed_generators(seeds.of_batch(samples[0].number, samples[0].copy))
        return items, _collated(collate, items) if items else None


def _items(maker: ItemMaker, samples: list[EpochSample]) -> Iterator[tuple[EpochSample, Any]]:
    """The samples that are not skipped, with their items."""
    for sample in samples:
        if maker.transform is not None:
            seed_generators(sample.seed)
        item = maker.item(sample)
        if item is not SKIP:
            yield sample, item


def _collated(collate: Callable[[list[Any]], Any], items: list[tuple[EpochSample, Any]]) -> Any:
    """What ``collate`` makes of the items. An error of it names their samples."""
    try:
        return collate([item for _, item in items])
    except Exception as error:
        add_batch_note(error, [name_of(sample) for sample, _ in items])
        raise


class BatchesWithStatus:
    """Iterates a generator of batches, and keeps the status that it returns as `status`."""

    def __init__(self, batches: Generator[Batch, None, str]) -> None:
        self.batches, self.status = batches, ""

    def __iter__(self) -> Iterator[Batch]:
        self.status = yield from self.batches
