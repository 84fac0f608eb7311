"""The native half of the package; import `fletch` instead."""

from os import PathLike
from typing import Any, Callable, Sequence, TypeAlias, final

__version__: str

#: Samples of a lease, at most.
LEASE_MAX: int
HELD_MAX: int

@final
class Buffer:
    """Immutable bytes that were received; what the views of `Version.read` are of."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Client:
    """A server, asked over connections that this process makes when it first needs them.

    Args:
        server: ``http://host:port``, ``https://host`` or ``unix:PATH`` (a server of this node: two to five
            times as fast).
        token: the bearer token, where the server wants one.
        token_file: a file that holds it and may be replaced while the client lives. Give one of the two.
        job: the job that bytes are counted for; without one it is ``anonymous``.
        timeout: seconds within which every call ends, all its attempts together; above 0, at most 86400.

    Raises:
        Invalid: a setting cannot be. Nothing is asked yet.
    """

    def __init__(
        self,
        server: str,
        *,
        token: str | None = None,
        token_file: str | PathLike[str] | None = None,
        job: str | None = None,
        timeout: float = 30.0,
    ) -> None: ...
    @property
    def server(self) -> str:
        """Where the server is, as it was given."""
    @property
    def job(self) -> str | None:
        """The job that bytes are counted for."""
    @property
    def timeout(self) -> float:
        """Seconds within which every call ends."""
    def info(self) -> dict[str, Any]:
        """What the server is, speaks and allows, as ``GET /v1/info`` answers.

        Raises:
            Invalid: it speaks no version that this build speaks.
            Unavailable: it does not answer.
        """
    def datasets(self) -> list[dict[str, Any]]:
        """The datasets of this principal's domain, by name: ``name``, ``uri``, ``tables``, ``registered_ns``."""
    def resolve(self, name: str) -> Version:
        """What ``NAME``, ``NAME@TAG`` or ``NAME@ROOT`` is now; ``latest`` without a tag.

        Raises:
            NotFound: there is no such dataset or tag, or not for this principal.
        """
    def stats(self) -> dict[str, int]:
        """What this process's connections counted since they were made.

        ``requests`` sent, ``retries`` among them, ``bytes`` of whole answers (streams are not
        counted), ``errors`` of calls.
        """
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class Entry:
    """A file, symlink, empty directory or member of a tar shard of a version. Hashable; equal by value."""

    @property
    def ordinal(self) -> int:
        """Its position in the version, from 0."""
    @property
    def path(self) -> str:
        """Relative path; a member's is its shard's path, ``/``, and the member's name."""
    @property
    def kind(self) -> str:
        """``"file"``, ``"symlink"``, ``"empty-dir"`` or ``"member"``."""
    @property
    def size(self) -> int:
        """Bytes of content; of the target for a symlink."""
    @property
    def hash(self) -> str | None:
        """BLAKE3 of the content, 64 hex digits; ``None`` where there is none."""
    @property
    def target(self) -> str:
        """The link's target; ``""`` for other kinds."""
    @property
    def sample(self) -> str | None:
        """The key of the sample it belongs to; its own path for a sample by itself; ``None`` for none."""
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class Sample:
    """What a training step consumes: an entry, or the neighbouring entries that share a key."""

    @property
    def key(self) -> str:
        """The key; the entry's path for a sample of one file."""
    @property
    def alone(self) -> bool:
        """Whether it is one entry by itself: then its key is that entry's path."""
    @property
    def ordinals(self) -> tuple[int, ...]:
        """Ordinals of its entries, ascending. The first one is the sample's id."""
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class Reading:
    """Whole files on their way: see `Version.read_ahead`."""

    def done(self) -> bool:
        """Whether they came, or failed: `views` will not wait for what is under way. Not after `views`, and not in a forked
        process.
        """

    def views(self) -> list[memoryview]:
        """The files, as `Version.read_many` has them, when all of them are here. What could not be read ahead is read now.

        Raises:
            As `Version.read_many`.
        """

@final
class Version:
    """An immutable state of a dataset. Its tables are read and checked when they are first looked at.

    Made by `Client.resolve`; pickles by its identity, so that another process reads the same
    version even if the tag moves.
    """

    @property
    def client(self) -> Client:
        """Whom it is read from."""
    @property
    def dataset(self) -> str:
        """The dataset's name."""
    @property
    def tag(self) -> str | None:
        """The tag it was resolved by; ``None`` when a root was given."""
    @property
    def root(self) -> str:
        """The version's identity, 64 hex digits."""
    @property
    def layout(self) -> str:
        """The layout it is read by, 64 hex digits."""
    @property
    def nbytes(self) -> int:
        """Content bytes of the version."""
    @property
    def created_ns(self) -> int:
        """When it was made, nanoseconds since 1970."""
    @property
    def sample_rule(self) -> str:
        """How entries form samples: ``"file"`` (each by itself) or ``"stem"`` (neighbours with one key)."""
    def __len__(self) -> int:
        """How many entries it has."""
    def entry(self, item: int | str) -> Entry:
        """An entry, by its ordinal or path.

        Raises:
            NotFound: there is none.
        """
    def entries(self, start: int = 0, stop: int | None = None) -> list[Entry]:
        """Entries ``start..stop`` in order of their paths' bytes; all of them without arguments."""
    def samples(self) -> list[Sample]:
        """All samples, in the order of their first entries."""
    def labels(self, prefix: str = "") -> tuple[list[str], list[int]]:
        """Labels by directory.

        Returns:
            The sorted names of the directories right below ``prefix`` that hold samples, and for each
            sample, as `samples` has them, its directory's index there; -1 for a sample in none.
        """
    def read(self, item: int | str) -> memoryview:
        """A whole file, by its ordinal or path, as a read-only view of format ``B``.

        It is of the bytes as they were received, without a copy, but for a file of at most 16 KiB, which is copied out of an answer
        that others share, and for one that came in several pieces, as all of more than 16 MiB do: these are put together.

        Raises:
            NotFound: there is no such entry.
            Invalid: it is a link or a directory, or longer than 4 GiB.
            Corrupt: its bytes are not the version's, twice in a row.
            Unavailable, Overloaded: not within the client's timeout.
        """
    def read_many(self, items: Sequence[int | str]) -> list[memoryview]:
        """Whole files, by ordinals or paths, in the order asked, over as few requests as will do.

        Raises:
            As `read`, for the first item that cannot be read.
        """
    def read_ahead(self, items: Sequence[int | str], after: Reading | None = None) -> Reading:
        """Begins to read whole files that will be asked for, beside whatever this process does, and returns at once. What was
        read is in memory until the result is dropped, which also ends what is still under way.

        Args:
            after: more than 4 MiB are read when this is done, so that what is asked for first does not come later for it.
        """
    def __reduce__(self) -> tuple[Any, ...]: ...

def _client(
    server: str, token: str | None, token_file: str | None, job: str | None, timeout: float
) -> Client: ...
def _entry(
    ordinal: int, path: str, kind: str, size: int, hash: str | None, target: str, sample: str | None
) -> Entry: ...
def _sample(key: str, alone: bool, ordinals: list[int]) -> Sample: ...
def _version(client: Client, what: str) -> Version: ...

# What `fletch.torch` is made of.

#: Epoch, rank, lease, entries, milliseconds that it lives: what acknowledging a lease takes, in any process.
_Token: TypeAlias = tuple[int, int, int, int, int]

@final
class Leased:
    """One leased sample."""

    @property
    def number(self) -> int:
        """The sample's number in the version."""
    @property
    def ordinal(self) -> int:
        """The ordinal of its first entry in the version: with the root its id."""
    @property
    def copy(self) -> int | None:
        """Which copy of it this is, from 0; ``None`` for one that only fills up a last step."""
    @property
    def paths(self) -> list[str]:
        """Paths of its files."""
    def views(self) -> list[memoryview]:
        """The bytes of its files, as read-only views."""

@final
class Reader:
    """One worker's side of an epoch; of the process that made it."""

    def next(
        self, want: int, tell: Callable[[float, str], None]
    ) -> tuple[str, tuple[_Token, list[Leased], bytes] | None]:
        """At most ``want`` samples: ``("batch", (token, samples, deliveries))``; ``("full", None)`` where none is to be had
        just now, ``("last", None)`` where what is left is in other hands, ``("done", None)`` where nothing is. ``tell`` is
        called about once a second with the seconds waited and why, while the server is gone.
        """
    def give_up(self) -> None:
        """Nothing more is asked for, and what was received ahead is not held any more."""

@final
class Job:
    """A declared job: what its workers and the process that steps share. It renews the leases that it holds."""

    def info(self) -> dict[str, Any]:
        """The job as it is now, with its epochs, as ``GET /v1/jobs/{job}`` answers."""
    def world(self, world: str) -> dict[str, Any]:
        """Changes who shares a step (JSON text)."""
    def reader(self, epoch: int, rank: int, worker: int, ahead: bool) -> Reader:
        """One worker's side of an epoch; ``ahead``: the next samples are received while the last ones are being used."""
    def hold(self, token: _Token) -> None:
        """A lease that another process received is held by this one from now on. Nobody is asked, where this process declared
        the job."""
    def ack(
        self,
        token: _Token,
        times: tuple[int, int, int],
        tell: Callable[[float, str], None],
        within: float | None = None,
    ) -> dict[str, Any] | None:
        """A whole lease was consumed; nanoseconds waited, prepared and stepped. Durable when this returns; ``None``: there was
        no answer within so many seconds."""
    def drop_lease(self, token: _Token) -> None:
        """A lease is given up: what it has is delivered again when it expires."""
    def hold_only(self, tokens: list[_Token]) -> None:
        """Of all that this process holds it goes on holding these leases; others, which got lost on their way to the consumer,
        are given up."""
    def state(self, epoch: int) -> bytes:
        """The epoch's self-contained state."""
    def ledger(self, epoch: int) -> bytes:
        """The epoch's ledger, as far as it is durable."""
    def put_state(self, epoch: int, state: bytes, replace: bool) -> dict[str, Any]:
        """Continues an epoch from a state."""
    def checkpoint(self, epoch: int, commit: int) -> dict[str, Any]:
        """The model was saved: what is acknowledged is committed under this number."""
    def rollback(self, epoch: int, commit: int) -> dict[str, Any]:
        """The model went back to a commit."""
    def receipt(self, epoch: int) -> str:
        """The receipt and certificate of a finished epoch, as JSON text."""
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class Sum:
    """What was received of an epoch of a version, added up: how many samples, and their LtHash."""

    def __init__(self, root: str) -> None: ...
    def add(self, deliveries: bytes) -> None:
        """Adds deliveries as `Reader.next` told them."""
    def merge(self, other: bytes) -> None:
        """Adds another sum, as its `bytes` has it."""
    def bytes(self) -> bytes:
        """The sum, for another process: 2,056 bytes."""
    @property
    def delivered(self) -> int:
        """How many samples were added."""
    def agrees(self, receipt: str) -> bool:
        """Whether exactly what the plan of this receipt says was received."""

def _declare(client: Client, spec: str) -> Job: ...
def _job(client: Client, spec: str) -> Job: ...
def _world(client: Client, name: str) -> str | None: ...
def _select(
    path: str | PathLike[str], keys: str | None, numbers: str | None, weights: str | None, draws: int | None
) -> str: ...
def _before_fork() -> None: ...
def _after_fork_in_child() -> None: ...
def _after_fork_in_parent() -> None: ...
