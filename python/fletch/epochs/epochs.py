"""`fletch.Epochs`: the epochs of a job for loops without PyTorch.

Must never: import a framework. The program makes arrays of the samples that it gets.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import AbstractContextManager
from typing import Any, Generator, Iterator, Sequence

from .. import Client, Invalid
from .contents import ContentForm
from .iteration import EpochIteration, acknowledged_batches
from .lease_stream import Batch, EpochSample
from .rank_epochs import EpochSettings, RankEpochs
from .rank_loader import leave_now
from .selection import Selection
from .server_wait import SERVER_WAIT_SECONDS


class _LockedIteration(EpochIteration):
    """An iteration that other threads may ask for batches: one asks at a time."""

    def __init__(
        self, job: str, batches: Generator[Any, None, None], lock: AbstractContextManager[Any]
    ) -> None:
        super().__init__(job, batches, "call epoch() again")
        self._lock = lock

    def __next__(self) -> Any:
        with self._lock:
            return super().__next__()


class _RankEpochs(RankEpochs):
    """The epochs of a rank, for which errors say what a user of `Epochs` can do."""

    _go_on = "give epoch() the number of the first epoch that is not finished"


class Epochs:
    """The epochs of a job as lists of samples, in an order that the server chooses.

    >>> with fletch.Epochs(client, "photos", job="jax-1", batch_size=64) as epochs:
    ...     for number in range(epochs.next_epoch, 90):
    ...         for batch in epochs.epoch(number):
    ...             params = step(params, np.stack([decode(sample.content) for sample in batch]))

    A batch is acknowledged when the loop asks for the next one, and the last batch of an epoch when the loop
    asks once more. So every sample of the plan is delivered *exactly once*, whichever process is killed. The
    package's own threads receive the next two batches while the loop uses this one.

    Make it in the process that reads: one for each rank. It starts no other process. For loaders of PyTorch
    with workers use `fletch.torch.EpochDataset`, whose jobs, states and receipts are the same.

    Its methods may be called from any thread, one at a time: frameworks ask for batches in threads of their
    own. A framework that asks for batches ahead of the steps acknowledges them early.

    Args:
        client: the client of the server.
        dataset: ``NAME[@TAG or ROOT]``, resolved once when the job is first declared. A draft is sealed
            first.
        job: the job's name. The same name with the same settings continues the same job.
        batch_size: the samples of one step of one rank, 1 to 4,096.
        rank, ranks: this process's rank and the number of ranks; without both, 0 and 1. If the program has
            initialised ``torch.distributed``, its rank and size are the default.
        order, buckets, replay, plan, select, seed, tail, visitation: as those of
            `fletch.torch.EpochDataset`.
        content: ``"view"``: every sample's content is the view of its file. ``"dict"``: every content is a
            dict of views by extension. By default a plain file has a view, and several files have a dict.
        take_over: takes the rank over at once if another process is the same rank of the job.
        server_wait: for how many seconds a call waits for a server that is gone; ``None``: for ever.
        state: a state of `state_dict`, which is loaded at once.

    Attributes:
        job: the job's name.
        root: the version's identity, 64 hex digits.
        rank, ranks: this process's rank, and the number of ranks.
        batch_size: the samples of a batch. The last one of an epoch may have fewer under ``tail="keep"``.

    Raises:
        NotFound: the dataset does not exist.
        Invalid: the settings are not valid, or a job of that name has other ones (``code ==
            "job_differs"``).
    """

    def __init__(
        self,
        client: Client,
        dataset: str,
        *,
        job: str,
        batch_size: int,
        rank: int | None = None,
        ranks: int | None = None,
        order: str = "substitute",
        buckets: dict[str, Any] | None = None,
        replay: bytes | None = None,
        plan: dict[str, Any] | None = None,
        select: Selection | str | os.PathLike[str] | None = None,
        seed: int | None = None,
        tail: str | None = None,
        visitation: str = "exactly-once",
        content: ContentForm = None,
        take_over: bool = False,
        server_wait: float | None = SERVER_WAIT_SECONDS,
        state: dict[str, Any] | None = None,
    ) -> None:
        settings = EpochSettings(
            job=job,
            batch_size=batch_size,
            rank=rank,
            ranks=ranks,
            order=order,
            buckets=buckets,
            replay=replay,
            plan=plan,
            select=select,
            seed=seed,
            tail=tail,
            visitation=visitation,
            epoch="next",
            content=content,
            take_over=take_over,
            server_wait=server_wait,
            state=state,
            gives_samples=True,
        )
        self._closed = False
        #: Held by the one thread that uses the epochs.
        self._lock = threading.RLock()
        self._own = _RankEpochs(client, dataset, settings)
        self.job, self.root = self._own.job, self._own.root
        self.rank, self.ranks = self._own.rank, self._own.ranks
        self.batch_size = batch_size
        self._own._begin(state)

    def __len__(self) -> int:
        """The batches of an epoch of this rank.

        With ``order="replay"`` an epoch may have one more or one fewer.
        """
        return self._own.steps

    def __enter__(self) -> Epochs:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        with self._lock:
            if not self._closed:
                # The error may say that the server is gone. So this waits for no ack.
                self._closed = True
                self._own._end_with_process()

    def __reduce__(self) -> Any:
        raise TypeError("fletch.Epochs belongs to one process; make it in the process that reads")

    @property
    def next_epoch(self) -> int:
        """The number of the epoch that is next: the current one, as long as something is left of it.

        At first it is the first epoch that the job has not finished; after `load_state_dict`, that of the
        state.
        """
        return self._own.epoch + int(self._own._is_done())

    def epoch(self, number: int | None = None) -> Iterator[list[EpochSample]]:
        """Begins an iteration of an epoch, or of what is left of it. Yields lists of `EpochSample`.

        A list has `batch_size` samples, or fewer in the last step under ``tail="keep"``. It is acknowledged
        when the next one is asked for. After a ``break`` the batch in hand is delivered again, unless
        `state_dict` was called. An iteration ends the one before.

        Args:
            number: the epoch's number; by default `next_epoch`.

        Raises:
            Invalid: the job finished that epoch before (``code == "epoch_closed"``), or this was closed.
            Unavailable: the server was gone for ``server_wait`` seconds.
        """
        with self._lock:
            if self._closed:
                raise Invalid(f"job {self.job}: these epochs were closed; make another fletch.Epochs")
            self._own.set_epoch(self.next_epoch if number is None else number)
            self._own._start_iteration()
            batches = acknowledged_batches(self._own, self._received(), in_loop=True, more=True)
            iteration = _LockedIteration(self.job, batches, self._lock)
            self._own._iteration = weakref.ref(iteration)
            return iteration

    def _received(self) -> Generator[Batch, None, None]:
        """The batches of the current epoch, until nothing is left of it."""
        # Under at-most-once a granted sample counts as delivered, so it must not be requested early.
        prefetch = self._own._visitation != "at-most-once"
        yield from self._own._leases(0, list, prefetch)
        yield from self._own._rest_of_leases(0, list)

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch: see `fletch.torch.EpochDataset.state_dict`.

        Call it after the step: the batch in hand counts as consumed. With several ranks, call it on all of
        them at the same step, and on rank 0 after the others.
        """
        with self._lock:
            return self._own.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state_dict` was called: see `fletch.torch.EpochDataset.load_state_dict`.

        Rank 0 sends the state to the server. The other ranks must begin after that: use a barrier.
        """
        with self._lock:
            self._own.load_state_dict(state)

    def begin_step(self) -> None:
        """Says that the loop has decoded the batch in hand, and steps from now on."""
        with self._lock:
            self._own.begin_step()

    def stats(self) -> dict[str, Any]:
        """The counters of this rank in the current epoch, and the proof: see `EpochDataset.stats`."""
        with self._lock:
            return self._own.stats()

    def consumed_sum(self) -> bytes:
        """The receipt sum of the samples that this rank consumed of the current epoch."""
        with self._lock:
            return self._own.consumed_sum()

    def verify(self, others: Sequence[bytes] = ()) -> bool:
        """Whether the ranks together consumed exactly the samples of the finished epoch's plan.

        Args:
            others: the `consumed_sum` of every other rank.

        Raises:
            Invalid: the epoch is not finished (``code == "epoch_open"``).
        """
        with self._lock:
            return self._own.verify(others)

    def append_consumption_log(self, path: str | os.PathLike[str]) -> None:
        """Appends a line for each sample of the batch in hand: see `EpochDataset.append_consumption_log`."""
        with self._lock:
            self._own.append_consumption_log(path)

    def ledger(self, epoch: int | None = None) -> bytes:
        """The ledger of an epoch, by default of the current one. ``order="replay"`` repeats it."""
        with self._lock:
            return self._own.ledger(epoch)

    def close(self) -> None:
        """Ends the iteration and gives the rank up. A second call does nothing.

        The server delivers the batch in hand again, unless it is the last of its epoch or `state_dict` was
        called.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._own._leave_iteration()
                leave_now(self._own._loader)
