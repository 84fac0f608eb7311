"""The native half of the package; import `fletch` instead."""

from os import PathLike
from typing import Any, Callable, Sequence, final

__version__: str

#: The most samples of a lease.
LEASE_MAX: int
#: The most samples that a rank may hold.
HELD_MAX: int

@final
class Client:
    """A client of a server. A process makes its connections when it first needs them.

    Args:
        server: ``http://host:port``, ``https://host``, or ``unix:PATH`` for a server on this node, which is
            two to five times as fast. Of a cluster give several URLs, as a list or with commas between them,
            the preferred one first. The client learns of the other servers by itself.
        token: the bearer token, if the server requires one.
        token_file: a file that holds the token. It may be replaced while the client lives. Give one of the
            two.
        job: the job to which the server counts the bytes; ``anonymous`` without it.
        timeout: the seconds within which every call ends, all its attempts together; above 0, at most 86400.
        ca_file: the CAs that may have signed the certificate of an ``https://`` server, in PEM form; without
            it the system's. The three files may be replaced while the client lives.
        cert_file: the certificate of this client in PEM form, if the server requires one.
        key_file: the key of that certificate in PEM form.
        verify: who hashes what a server of this node puts into the memory that it shares with this process,
            and ranges of files. With ``"client"``, this process, as everywhere. With ``"server"``, the
            server alone: more than twice as fast for long samples, and a range is read without its chunk.

    Raises:
        Invalid: a setting is not valid. The constructor sends no request.
    """

    def __init__(
        self,
        server: str | Sequence[str] | None = None,
        *,
        token: str | None = None,
        token_file: str | PathLike[str] | None = None,
        job: str | None = None,
        timeout: float = 30.0,
        ca_file: str | PathLike[str] | None = None,
        cert_file: str | PathLike[str] | None = None,
        key_file: str | PathLike[str] | None = None,
        verify: str = "client",
    ) -> None: ...
    @property
    def verify(self) -> str:
        """Who hashes what a server of this node puts into the memory that it shares."""
    @property
    def server(self) -> str:
        """The server's address, as it was given. Several have commas between them."""
    @property
    def job(self) -> str | None:
        """The job to which the server counts the bytes."""
    @property
    def timeout(self) -> float:
        """The seconds within which every call ends."""
    def info(self) -> dict[str, Any]:
        """The server's version, formats and limits, as ``GET /v1/info`` returns them.

        Raises:
            Invalid: the server speaks no version of the API that this build speaks.
            Unavailable: the server does not answer.
        """
    def datasets(self) -> list[dict[str, Any]]:
        """The datasets of this principal's domain, by name.

        Each has ``name``, ``uri``, ``tables`` and ``registered_ns``.
        """
    def resolve(self, name: str) -> Version:
        """The version that ``NAME``, ``NAME@TAG`` or ``NAME@ROOT`` names now. The default tag is ``latest``.

        Raises:
            NotFound: the dataset or tag does not exist, or this principal may not see it.
        """
    def stats(self) -> dict[str, int]:
        """Counters of this process's connections since they were made.

        ``requests`` sent, ``retries`` among them, ``bytes`` of complete responses (without streams), and
        ``errors`` of calls.
        """
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class Entry:
    """A file, symlink, empty directory or member of a tar shard of a version. Hashable; equal by value."""

    @property
    def ordinal(self) -> int:
        """The entry's position in the version, from 0."""
    @property
    def path(self) -> str:
        """The relative path. A member's path is its shard's path, ``/``, and the member's name."""
    @property
    def kind(self) -> str:
        """``"file"``, ``"symlink"``, ``"empty-dir"`` or ``"member"``."""
    @property
    def size(self) -> int:
        """The bytes of the content; of the target for a symlink."""
    @property
    def hash(self) -> str | None:
        """The BLAKE3 hash of the content, 64 hex digits; ``None`` without content."""
    @property
    def target(self) -> str:
        """The target of a symlink; ``""`` for other kinds."""
    @property
    def sample(self) -> str | None:
        """The key of the entry's sample: the entry's own path for a single sample, ``None`` for no sample."""
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class Sample:
    """The unit that a training step consumes: a single entry, or neighbouring entries that share a key."""

    @property
    def key(self) -> str:
        """The key; for a single sample the entry's path."""
    @property
    def single(self) -> bool:
        """Whether the sample is a single entry without a key of its own."""
    @property
    def ordinals(self) -> tuple[int, ...]:
        """The ordinals of the sample's entries, ascending. The first one identifies the sample."""
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class PendingRead:
    """Whole files that are being read: see `Version.prefetch`."""

    def done(self) -> bool:
        """Whether the read ended, so that `views` does not wait for it.

        False after `views`, and in a forked process.
        """

    def views(self) -> list[memoryview]:
        """Waits for the files, and returns them as `Version.read_many` does.

        Reads again what could not be prefetched.

        Raises:
            As `Version.read_many`.
        """

@final
class Version:
    """An immutable state of a dataset. `Client.resolve` returns it.

    Its tables are read and checked when they are first needed. It pickles by its identity, so another process
    reads the same version even if the tag moves.
    """

    @property
    def client(self) -> Client:
        """The client that reads the version."""
    @property
    def dataset(self) -> str:
        """The dataset's name."""
    @property
    def tag(self) -> str | None:
        """The tag that was resolved; ``None`` if a root was given."""
    @property
    def root(self) -> str:
        """The version's identity, 64 hex digits."""
    @property
    def layout(self) -> str:
        """The identity of the layout that is read, 64 hex digits."""
    @property
    def nbytes(self) -> int:
        """The bytes of content of the version."""
    @property
    def created_ns(self) -> int:
        """The time when the version was made, in nanoseconds since 1970 UTC."""
    @property
    def draft(self) -> bool:
        """Whether the version is a draft: it was listed, and the hashes of its files are not known."""
    @property
    def sample_rule(self) -> str:
        """How entries form samples: ``"file"`` (one each) or ``"stem"`` (neighbours with one key)."""
    def __len__(self) -> int:
        """The number of entries."""
    def entry(self, item: int | str) -> Entry:
        """The entry with this ordinal or path.

        Raises:
            NotFound: the version has no such entry.
        """
    def entries(self, start: int = 0, stop: int | None = None) -> list[Entry]:
        """The entries ``start..stop`` in byte order of their paths; without arguments all entries."""
    def children(self, directory: str = "") -> list[tuple[str, Entry | None]]:
        """The children of a directory, by name: files and links with their entries, directories with None.

        ``""`` is the root. Members of tar shards are no children. It reads the part of the tables that has
        the directory, however many entries the version has.

        Raises:
            NotFound: the version has no such directory.
            Invalid: the path is that of a file or a link.
        """
    def is_directory(self, path: str) -> bool:
        """Whether this is the path of a directory of the version. ``""`` is the root."""
    def samples(self) -> list[Sample]:
        """All samples, in the order of their first entries."""
    def labels(self, prefix: str = "") -> tuple[list[str], list[int]]:
        """Labels each sample by its directory.

        Returns:
            The sorted names of the directories right below ``prefix`` that hold samples; and for each sample,
            in the order of `samples`, the index of its directory, or -1 for a sample in none of them.
        """
    def read(self, item: int | str) -> memoryview:
        """Reads a whole file, by its ordinal or path. Returns a read-only view of format ``B``.

        The view refers to the received bytes, without a copy. Two kinds of files are copied once: a file of
        at most 16 KiB, because it shares a response with other files; and a file that came in several pieces,
        as every file above 16 MiB does.

        Raises:
            NotFound: the version has no such entry.
            Invalid: the entry is a link or a directory, or longer than 4 GiB.
            Corrupt: the received bytes did not match the version's hash, twice in a row.
            Unavailable, Overloaded: the server did not deliver the file within the client's timeout.
        """
    def read_many(self, items: Sequence[int | str]) -> list[memoryview]:
        """Reads whole files, by ordinals or paths, in few requests. Returns views in the order of ``items``.

        Raises:
            As `read`, for the first item that cannot be read.
        """
    def read_range(self, item: int | str, start: int, stop: int | None = None) -> memoryview:
        """Reads a range of a file, by its ordinal or path. See `read_ranges`."""
    def read_ranges(self, ranges: Sequence[tuple[int | str, int, int | None]]) -> list[memoryview]:
        """Reads ranges of files in few requests. Returns read-only views in the order of ``ranges``.

        A range is (file, start, stop): the file's ordinal or path, the first byte, and the byte after the
        last one. ``None`` stands for the file's end. A range is cut at that end, as a slice of ``bytes``.

        A client with ``verify="client"`` reads the whole chunks that the ranges touch (up to 16 MiB each),
        once a call, and hashes them; of a small file of a pack it reads the file. The last 32 MiB stay in
        memory for the next call. With ``verify="server"`` it reads the ranges alone, and trusts the server
        and the network with them. Files may be longer than 4 GiB.

        Raises:
            NotFound: the version has no such entry.
            Invalid: the entry is a link or a directory, the range ends before it begins, or it is longer than
                4 GiB; or the version is a draft (``code == "not_sealed"``).
            Corrupt: the received bytes did not match the version's hash, twice in a row.
            Unavailable, Overloaded: the server did not deliver the bytes within the client's timeout.
        """
    def prefetch(self, items: Sequence[int | str], after: PendingRead | None = None) -> PendingRead:
        """Starts to read whole files in the background, and returns at once.

        The bytes stay in memory until the result is dropped. Dropping it also ends a read in progress.

        Args:
            after: an earlier read. If ``items`` have more than 4 MiB, this read waits for the earlier one, so
                that it does not delay it.
        """
    def __reduce__(self) -> tuple[Any, ...]: ...

def _client(
    server: str,
    token: str | None,
    token_file: str | None,
    job: str | None,
    timeout: float,
    tls: tuple[str | None, str | None, str | None],
) -> Client: ...
def _entry(
    ordinal: int, path: str, kind: str, size: int, hash: str | None, target: str, sample: str | None
) -> Entry: ...
def _sample(key: str, single: bool, ordinals: list[int]) -> Sample: ...
def _version(client: Client, what: str) -> Version: ...

# Private: the parts of `fletch.torch`.

#: Epoch, rank, lease, entries, and the lease's lifetime in milliseconds. Any process can acknowledge the
#: lease with it.
_Token = tuple[int, int, int, int, int]

@final
class Leased:
    """One leased sample."""

    @property
    def number(self) -> int:
        """The sample's number in the version."""
    @property
    def ordinal(self) -> int:
        """The ordinal of the sample's first entry. Root and ordinal identify the sample."""
    @property
    def copy(self) -> int | None:
        """The number of this copy of the sample, from 0; ``None`` for one that only pads a last step."""
    @property
    def paths(self) -> list[str]:
        """The paths of the sample's files."""
    @property
    def shared(self) -> int:
        """How many of its bytes another job, or an earlier epoch, had brought to the server."""
    def views(self) -> list[memoryview]:
        """The bytes of the sample's files, as read-only views."""

@final
class Reader:
    """Receives the leases of one worker of an epoch."""

    def next(
        self, want: int, report: Callable[[float, str], None]
    ) -> tuple[str, tuple[_Token, list[Leased], bytes, bytes] | None]:
        """Receives a lease of at most ``want`` samples: ``("batch", (token, samples, deliveries, grant))``.

        Returns ``("full", None)`` if no lease is available now, ``("last", None)`` if other processes hold
        what is left of the epoch, and ``("done", None)`` if the epoch is finished. While the server is gone,
        ``report`` is called about once a second with the seconds waited and the reason.
        """
    def close(self) -> None:
        """Ends the reader. It requests no more leases, and releases those that it prefetched."""

@final
class Job:
    """A declared job. It renews the leases that this process holds."""

    def info(self) -> dict[str, Any]:
        """The job's current state, with its epochs, as ``GET /v1/jobs/{job}`` returns it."""
    def world(self, world: str) -> dict[str, Any]:
        """Changes the job's world: ranks, batch and tail, as JSON text."""
    def reader(
        self,
        epoch: int,
        rank: int,
        worker: int,
        leases_ahead: int,
        journal: tuple[int, int, int] | None = None,
    ) -> Reader:
        """The reader of one worker.

        It asks for ``leases_ahead`` leases while the caller uses the last one. ``journal`` is a file
        descriptor, the first slot and the number of slots for the numbers of its leases.
        """
    def join(self, epoch: int, rank: int) -> None:
        """Begins to keep a record of what this process consumes as a rank: if the job's server is lost, the
        job goes on with it at another server. Only for the process that acknowledges for the rank."""
    def hold(self, token: _Token, grant: bytes = b"") -> bool:
        """Renews a lease that another process received, and notes ``grant``, what the server granted.

        Returns whether the batch counts: not if its server was lost since. Its samples come again then.
        """
    def ack(
        self,
        token: _Token,
        times: tuple[int, int, int, int | None, int | None],
        report: Callable[[float, str], None],
        within: float | None = None,
        in_loop: bool = False,
    ) -> dict[str, Any] | None:
        """Acknowledges a whole lease. ``times`` are the nanoseconds waited, prepared and stepped, the
        device's time of a step, of this one or of an earlier one, and how long the process that prepared the
        batch waited for its lease. ``in_loop`` says that the loop itself prepares batches.

        The ack is durable when this returns. ``None`` means that the server did not answer ``within`` this
        many seconds.
        """
    def drop_lease(self, token: _Token) -> None:
        """Drops a lease that this process holds. The server delivers its samples again, at once if it can be
        told.
        """
    def forget_lease(self, token: _Token) -> None:
        """Stops renewing a lease of which the server said that it is gone."""
    def hold_only(self, tokens: list[_Token]) -> None:
        """Drops all held leases but these. The others were lost on their way to the consumer."""
    def release(self, epoch: int, rank: int, leases: list[int]) -> None:
        """Releases leases that other processes received for this one and that it will not use."""
    def settle(self, within: float) -> bool:
        """Waits until the server knows of every dropped lease, at most ``within`` seconds.

        Returns whether it does; at once if no lease was dropped.
        """
    def leave(self, within: float | None = None) -> None:
        """Gives up every rank as which this process read, with its leases.

        Waits ``within`` so many seconds for the answer. Without it the request is made in the background, and
        if it fails, the leases expire by themselves.
        """
    def state(self, epoch: int) -> bytes:
        """The epoch's self-contained state."""
    def ledger(self, epoch: int) -> bytes:
        """The durable part of the epoch's ledger."""
    def put_state(self, epoch: int, state: bytes, replace: bool) -> dict[str, Any]:
        """Continues an epoch from a state."""
    def checkpoint(self, epoch: int, commit: int) -> dict[str, Any]:
        """Commits the acknowledged samples under this number, because the model was saved."""
    def rollback(self, epoch: int, commit: int) -> dict[str, Any]:
        """Rolls the epoch back to a commit."""
    def receipt(self, epoch: int) -> str:
        """The receipt and certificate of a finished epoch, as JSON text."""
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class ReceiptSum:
    """The number of received samples of an epoch, and their LtHash. A receipt is compared with it."""

    def __init__(self, root: str) -> None: ...
    def add(self, deliveries: bytes) -> None:
        """Adds deliveries, in the form that `Reader.next` returns."""
    def merge(self, other: bytes) -> None:
        """Adds another sum, in the form that `bytes` returns."""
    def bytes(self) -> bytes:
        """The sum as 2,056 bytes, for another process."""
    @property
    def delivered(self) -> int:
        """The number of samples that were added."""
    def agrees(self, receipt: str) -> bool:
        """Whether the sum is exactly that of the receipt's plan."""

def _declare(client: Client, spec: str, loader: str) -> Job: ...
def _describe(client: Client, spec: str) -> str | None: ...
def _seal(client: Client, dataset: str) -> str: ...
def _sealing(client: Client, dataset: str) -> str: ...
def _job(client: Client, spec: str, loader: str, server: str | None = None) -> Job: ...
def _move_job(client: Client, id: str, epoch: int, state: bytes) -> None: ...
def _delete_job(client: Client, id: str) -> None: ...
def _world(client: Client, name: str) -> str | None: ...
def _select(
    path: str | PathLike[str], keys: str | None, numbers: str | None, weights: str | None, draws: int | None
) -> str: ...
def _before_fork() -> None: ...
def _after_fork_in_child() -> None: ...
def _after_fork_in_parent() -> None: ...
