"""Epochs for PyTorch: the server chooses the order of the samples, and delivers each one exactly once with a
receipt.

`fletch.epochs` has what needs no torch. Here are the workers of loaders, and the frameworks that wrap them.

Invariant: a dataset has one iteration at a time, and no sample is requested before one begins.
"""

from __future__ import annotations

import os
from typing import Any, Callable, Iterator, Literal

import torch.utils.data

from .. import Client, Invalid, _native
from ..epochs.ack_tracking import COUNTERS
from ..epochs.contents import ContentForm
from ..epochs.lease_stream import EpochSample
from ..epochs.rank_epochs import EpochSettings, RankEpochs
from ..epochs.sample_errors import OnError
from ..epochs.selection import Selection
from ..epochs.server_wait import SERVER_WAIT_SECONDS
from .items import items
from .orphans import end_with_parent
from .worker_table import WorkerTable
from .wrappers import (
    is_begun_after_a_step,
    refuse_repeated_batches,
    refuse_resumes_without_state,
    refuse_wrappers_of_epochs,
    state_that_lightning_keeps,
)


class EpochDataset(RankEpochs, torch.utils.data.IterableDataset[Any]):
    """The epochs of a job, one after the other, in an order that the server chooses.

    Iterate it with :class:`fletch.torch.DataLoader`. That loader acknowledges a batch when the loop asks for
    the next one; it acknowledges the last batch of an epoch also when the next epoch begins. So every sample
    of the plan is delivered *exactly once*, whichever process is killed. Any other iteration (torch's own
    loader, or the dataset itself, sample by sample) is *at most once*: a sample is acknowledged before the
    loop gets it, and `stats` says so.

    A batch is what the loader's ``collate_fn`` makes of a list of items. Tensors of shape ``(…)`` become one
    of shape ``(n, …)``, where n is `batch_size`, or less in the last step under ``tail="keep"``.

    While the server is gone, the loop gets the batches that workers received already, for half of the time
    that a lease lives. Then it waits for the server, for `server_wait` seconds. A loader with a ``timeout``
    waits at once, because waiting workers would exceed the timeout. The logger ``fletch`` warns of it,
    `stats` counts the seconds, and the epoch continues when the server is back.

    **Not for validation, test or inference**: use `EvalDataset`. An iteration continues the epoch of the job.
    After a ``break``, an error, ``next(iter(loader))`` or a limit on the batches, the next iteration delivers
    the rest of that epoch, not a whole pass. The batches that were left come first: their leases are released
    at once. Only the leases of a process that was killed have to expire.

    Args:
        client: the client of the server.
        dataset: ``NAME[@TAG or ROOT]``, resolved once when the job is first declared. A draft is sealed
            first: the server reads what nobody has read of it, and a warning says so.
        job: the job's name. The same name with the same settings continues the same job. With another number
            of ranks, the job continues only after `load_state_dict`. Settings are compared as text:
            ``photos`` and ``photos@v3`` differ.
        batch_size: the samples of one step of one rank, at most 4,096 (the samples of a lease).
        transform: makes an item of an `EpochSample`. Without it the item is the sample's ``content``.
        rank, ranks: this process's rank and the number of ranks. By default those of ``torch.distributed`` if
            it is initialised, else 0 and 1. If ``WORLD_SIZE`` names several ranks, one of the two is
            required.
        order: ``"substitute"``: any sample that is still due, which is the fastest order. ``"strict"``: a
            permutation that the seed fixes. ``"bucketed"``: as strict, and the samples of one step of all
            ranks come from one bucket. ``"replay"``: the samples that each rank consumed in an earlier epoch,
            in the same order.
        buckets: the buckets of ``order="bucketed"``, or of ``"replay"`` of such an epoch: ``{"lengths": [b0,
            b1, …]}`` (ascending bounds of the bytes of a sample's files together), ``{"prefixes": ["de/",
            …]}`` (of the sample's key: the first that matches, or none) or ``{"groups": [0, 2, …]}`` (a
            number below 65,536 for each sample).
        replay: the `ledger` of the epoch that ``order="replay"`` repeats. It must be of a job with the same
            version, plan (or ``select``), buckets and number of ranks. Every epoch of the new job repeats it.
        plan: the samples of an epoch, as the ``plan`` of ``POST /v1/jobs``; by default every sample once.
        select: the samples of an epoch, as the path of a Parquet or CSV file with a column ``key`` or
            ``number``, or as a `Selection`. It replaces the base of ``plan``.
        seed: the seed of every random choice. By default the hash of the job's name; with ``replay`` the
            ledger's seed, and no other seed can be given.
        tail: a last step that is not complete: ``"keep"`` (one rank only), ``"drop"`` or ``"pad"``. By
            default ``"keep"`` for one rank and ``"drop"`` for several. Every rank gets the same number of
            steps.
        visitation: ``"exactly-once"``, ``"at-most-once"`` or ``"checkpoint"``. Under ``"checkpoint"``,
            `state_dict` commits and `load_state_dict` rolls back to that commit, so later samples are
            delivered again.
        epoch: the number of the first epoch; or ``"next"``: the first one that the job has not finished, for
            a script that is started again without a state. An epoch that was finished before is not delivered
            again: iterating it is an error.
        on_error: what happens if ``transform`` fails. ``"raise"``: the error ends the loop, with a note that
            names the sample. ``"skip"``: the sample is left out of its batch, counted in `stats` and logged.
            It counts as consumed. Or a callable of the error and the sample, which returns an item in its
            place or `fletch.torch.SKIP`. A batch whose every sample is skipped is acknowledged and passed
            over, so the loop has one step less. An error of Fletch that is retryable is always raised.
        content: ``"view"``: every sample's content is the view of its file, and a sample of several files is
            an error. ``"dict"``: every content is a dict of views by extension, also that of a plain file. By
            default a plain file has a view, and members of a tar shard, or several files, have a dict.
        take_over: takes the rank over at once if another process is the same rank of the job. That process
            gets the error ``rank_taken``. Without it, this process waits until the other one has been silent
            for ``limits.lease_ttl`` of the server, and gets the error ``rank_in_use`` if it is not silent.
        server_wait: for how many seconds a call waits for a server that is gone, 540 by default. A warning
            says so at once and then every minute; after that time the error `Unavailable` ends the loop.
            ``None``: for ever.
        state: a state of `state_dict`, which is loaded at once, as by `load_state_dict`.

    Attributes:
        steps: the number of steps of an epoch of this rank.
        root: the version's identity, 64 hex digits.

    Raises:
        NotFound: the dataset does not exist.
        Invalid: the settings are not valid (``code == "bad_plan"``; unknown keys are named), the file of
            `select` is not valid, a job of that name has other settings (``code == "job_differs"``), or the
            ledger is damaged or of another plan (``code == "bad_ledger"``).
    """

    def __init__(
        self,
        client: Client,
        dataset: str,
        *,
        job: str,
        batch_size: int,
        transform: Callable[[EpochSample], Any] | None = None,
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
        epoch: int | Literal["next"] = 0,
        on_error: OnError = "raise",
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
            epoch=epoch,
            transform=transform,
            on_error=on_error,
            content=content,
            take_over=take_over,
            server_wait=server_wait,
            state=state,
        )
        super().__init__(client, dataset, settings)
        #: The number of iterations that began in this process.
        self._iterations = 0
        #: In a worker's copy: whether the process that made the worker has a batch in hand or unacknowledged.
        self._parent_has_unacked = False
        self._worker_table = WorkerTable(self.epoch, len(COUNTERS), len(self._acks.sum.bytes()))
        self._begin(state)

    def __len__(self) -> int:
        """The samples of an epoch of this rank, including those that pad a last step.

        `steps` is the number of steps. With ``order="replay"`` an epoch may have up to a batch more or fewer.
        """
        return self._epoch_samples

    def _check_held(self, workers: int, waiting: int) -> None:
        """Raises `Invalid` if a rank may not hold the batches of this many workers.

        The server limits what a rank holds. Past the limit it could refuse the very batch for which the loop
        waits.
        """
        # For each worker: the batches that wait for the loop, one on its way, and, in a fixed order, one that
        # waits for its turn. In addition the batch in hand.
        held = min((workers * (waiting + 1 + self._fixed_order) + 1) * self.batch_size, self._epoch_samples)
        if held > _native.HELD_MAX and self._visitation != "at-most-once":
            raise Invalid(
                f"{workers} workers with {waiting} batches each may hold {held} samples, and a rank may hold"
                f" {_native.HELD_MAX}: use fewer workers, or a smaller prefetch_factor or batch_size"
            )

    def __getstate__(self) -> dict[str, Any]:
        # A worker's copy only receives. The process of the loop tracks what is consumed.
        self._refuse_wrappers()
        self._require_world()
        own = dict.fromkeys(("_acks", "_proof", "_iteration"))
        return {**self.__dict__, **own, "_parent_has_unacked": self._acks.has_unacked()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_epoch(self.epoch)

    def _start_iteration(self) -> None:
        """Begins an iteration of this epoch, or of the next one if this one is over."""
        if not self._has_iterated and self._restored_epoch is None:
            state = state_that_lightning_keeps(self.job)
            if state is not None:
                self.load_state_dict(state)
        self._refuse_trainers()
        if is_begun_after_a_step():
            self._acks.mark_consumed()
        super()._start_iteration()

    def _refuse_wrappers(self) -> None:
        """Raises `Invalid` if a wrapper that would leave out samples begins an iteration."""
        refuse_wrappers_of_epochs(self.job, self.rank, self.ranks)
        self._refuse_trainers()

    def _refuse_trainers(self) -> None:
        """Raises `Invalid` if a trainer continues without a state, or wants the same batches again."""
        refuse_repeated_batches(self.job)
        if self._restored_epoch is None:
            refuse_resumes_without_state(self.job, self._is_first, self._was_begun)

    def _is_first(self) -> bool:
        """Whether no iteration of this dataset began before, and nobody chose its epoch."""
        return self._iterations == 0 and not self._follows and self._worker_table.is_unused()

    def _was_begun(self, loader_seed: int | None) -> bool:
        """Whether samples of the job were consumed before the iteration of torch's loader with this seed.

        Those do not count that other workers of the iteration consume, or other ranks of this run.
        """
        # What a worker consumed itself belongs to its loader.
        is_workers = torch.utils.data.get_worker_info() is not None and self._iterations > 0
        own = self._consumed_earlier or (self._acks.counts["samples"] > 0 and not is_workers)
        own = own or self._worker_table.has_run(but_for=loader_seed)
        return (self._earlier.is_begun or own) and self._has_begun()

    def _has_begun(self) -> bool:
        """Whether the server delivered a sample of the job that was acknowledged."""
        return any(e["acked"] > 0 for e in self._acks.wait_for_server(lambda _: self._job.info())["epochs"])

    # The progress of workers of torch's own loader, which acknowledge samples themselves.

    def _totals(self) -> tuple[dict[str, int], Any]:
        """The counters and the receipt sum of the epoch: of this process and of workers of torch's loader."""
        if torch.utils.data.get_worker_info() is not None:
            return super()._totals()
        counts, sums = self._worker_table.consumed()
        total = _native.ReceiptSum(self.root)
        for one in (self._acks.sum.bytes(), *sums):
            total.merge(one)
        return {key: self._acks.counts[key] + more for key, more in zip(COUNTERS, counts)}, total

    def _read_workers(self) -> None:
        """Reads the progress of workers of torch's own loader, which they report in no other way."""
        if torch.utils.data.get_worker_info() is not None:
            return
        latest = self._worker_table.latest()
        if latest.epoch != self.epoch:
            self._begin_epoch(latest.epoch)
        if latest.workers > 0:
            self._mode = "at-most-once"
            if latest.over and not self._over:
                self._finish()

    def _set_next_epoch(self, epoch: int, over: bool = False) -> None:
        """Makes the next iteration of workers read this epoch; with ``over`` the one after it."""
        self._worker_table.set_epoch(epoch, over)

    def __iter__(self) -> Iterator[Any]:
        """Iterates single items, at most once: a batch is acknowledged before the loop gets its items."""
        # Torch calls this once for each iteration in each worker, and starts to read later, or never.
        self._refuse_wrappers()
        self._iterations += 1
        info = torch.utils.data.get_worker_info()
        if info is not None:
            end_with_parent()
        return items(self, info, self._iterations)
