"""What runs where samples are received: leases, each as a batch for the process that steps.

Invariant: a batch is one lease, from the worker that receives it to the ack of the process that steps.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable, Generator, Iterator

from .. import FletchError, _native
from .keyed import Keys, by_extension, extension

_log = logging.getLogger("fletch")

#: When a server that was gone was waited for: from and to nanoseconds of the monotonic clock, which is that of all processes.
Stalls = list[tuple[int, int]]


@dataclass(frozen=True)
class EpochSample:
    """A sample as it was leased.

    Attributes:
        content: a read-only ``memoryview`` of the file, of format ``B`` and shape ``(bytes,)``; for versions whose
            samples have keys, a dict of views by extension, with ``"__key__"``.
        path: the path of its first file in the version.
        number: the sample's number in the version, from 0.
        ordinal: the ordinal of its first entry: with the root its identity.
        copy: which copy of it this is, from 0; ``None`` for one that only fills up a last step.
    """

    content: Any
    path: str
    number: int
    ordinal: int
    copy: int | None


@dataclass
class Batch:
    """A lease on its way from the worker to the loop; without a token there was none to be had just then."""

    token: tuple[int, int, int, int, int] | None
    deliveries: bytes = b""
    nbytes: int = 0
    prepared_ns: int = 0
    stalls: Stalls = field(default_factory=list)
    content: Any = None
    #: Whose it is; set where a worker hands it on.
    worker: int = 0
    #: The worker has nothing more.
    ended: bool = False
    #: What it ended with.
    error: FletchError | None = None

    @property
    def lease(self) -> int:
        """The lease's number: leases of an epoch are numbered as they are granted."""
        return 0 if self.token is None else self.token[2]

    @property
    def held(self) -> tuple[int, int, int, int, int]:
        """The token of a batch that is one."""
        assert self.token is not None
        return self.token

    def pin_memory(self) -> Batch:
        """What torch calls for ``pin_memory=True``."""
        from torch.utils.data._utils.pin_memory import pin_memory

        self.content = pin_memory(self.content)
        return self


@dataclass(frozen=True)
class Receiver:
    """What one rank receives of an epoch, and what becomes of a sample.

    Attributes:
        job: the declared job.
        name: its name.
        epoch: which epoch.
        rank: whose leases.
        size: samples of a lease, at most.
        keys: of the samples, where they have any.
        transform: what makes an item of a sample.
    """

    job: _native.Job
    name: str
    epoch: int
    rank: int
    size: int
    keys: Keys | None
    transform: Callable[[EpochSample], Any] | None

    def leases(
        self, worker: int, collate: Callable[[list[Any]], Any], ahead: bool = False
    ) -> Generator[Batch, None, str]:
        """Leases of one worker until there are none (and whether there can be more); where none is to be had just
        now, an empty one. ``ahead``: for those who go on until there are none, and wait for nobody: the next one is received
        while the last one is decoded.
        """
        ask = (self.epoch, self.rank, worker, ahead)
        reader, stalls = patiently(self.name, self.epoch, lambda _: self.job.reader(*ask))
        try:
            return (yield from self._received(reader, collate, stalls))
        finally:
            reader.give_up()

    def _received(
        self, reader: _native.Reader, collate: Callable[[list[Any]], Any], stalls: Stalls
    ) -> Generator[Batch, None, str]:
        while True:
            (status, told), gone = patiently(self.name, self.epoch, partial(reader.next, self.size))
            stalls += gone
            if status in ("last", "done"):
                return str(status)
            if told is None:
                yield Batch(None)
                continue
            token, leased, deliveries = told
            begun = time.monotonic_ns()
            try:
                keys, gone = patiently(self.name, self.epoch, lambda _: [self._key(one) for one in leased])
                stalls += gone
                samples = [_sample(one, key) for one, key in zip(leased, keys)]
                nbytes = sum(_nbytes(s.content) for s in samples)
                items = [s.content if self.transform is None else self.transform(s) for s in samples]
                collated = collate(items)
            except BaseException:
                # Nobody gets this batch: it is not renewed for as long as this process lives.
                self.job.drop_lease(token)
                raise
            prepared = time.monotonic_ns() - begun - sum(end - start for start, end in gone)
            yield Batch(token, deliveries, nbytes, prepared, stalls, collated)
            stalls = []

    def _key(self, leased: _native.Leased) -> str | None:
        return None if self.keys is None else self.keys.of(leased.paths[0], leased.ordinal)


def _sample(leased: _native.Leased, key: str | None) -> EpochSample:
    paths, views = leased.paths, leased.views()
    what = views[0] if key is None else by_extension(key, map(extension, paths), views)
    return EpochSample(what, paths[0], leased.number, leased.ordinal, leased.copy)


class Told:
    """What a generator yields, and what it returned at its end."""

    def __init__(self, made: Generator[Batch, None, str]) -> None:
        self.made, self.last = made, ""

    def __iter__(self) -> Iterator[Batch]:
        self.last = yield from self.made


class Silence:
    """A wait for a server that may be gone: the log says when it begins and how long it was."""

    def __init__(self, job: str, epoch: int) -> None:
        self.what = f"job {job}, epoch {epoch}"
        self.begun, self.gone = time.monotonic_ns(), False

    def tell(self, seconds: float, why: str) -> None:
        if not self.gone:
            _log.warning("%s waits for the server: %s", self.what, why)
        self.gone = True

    def over(self) -> Stalls:
        """When it was, if it was."""
        if not self.gone:
            return []
        now = time.monotonic_ns()
        _log.warning("%s goes on after %.1f s", self.what, (now - self.begun) / 1e9)
        return [(self.begun, now)]


def patiently(name: str, epoch: int, call: Callable[[Callable[[float, str], None]], Any]) -> tuple[Any, Stalls]:
    """A call that waits for a server that is gone, and says so: what it gave, and when it waited."""
    silence = Silence(name, epoch)
    while True:
        try:
            return call(silence.tell), silence.over()
        except FletchError as error:
            if not error.retryable:
                raise
            silence.tell(0.0, str(error))


def _nbytes(content: Any) -> int:
    if isinstance(content, memoryview):
        return content.nbytes
    return sum(view.nbytes for view in content.values() if isinstance(view, memoryview))
