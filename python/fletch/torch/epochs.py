"""Epochs: the server chooses the order of the samples, and delivers each one exactly once with a receipt.

Invariant: a dataset has one iteration at a time, and no sample is requested before one begins.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from typing import Any, Callable, Generator, Iterator, Literal, Sequence

import torch.utils.data

from .. import Client, Invalid, _native
from . import states
from .ack_tracking import COUNTERS
from .consumption import EpochConsumption
from .contents import ContentForm, checked_content_form
from .declaration import Declaration, spec_of
from .items import items
from .job_progress import EarlierProgress, epoch_of, next_epoch, refuse_finished_epoch, report_rest
from .lease_stream import _SETTLE_SECONDS, Batch, EpochSample, Receiver
from .orphans import end_with_parent
from .rank_loader import RankLoader, leave_at_end, leave_now
from .ranks import rank_of
from .sample_errors import OnError, checked_on_error
from .sample_keys import SampleKeys
from .selection import Selection, plan_with_selection
from .server_wait import SERVER_WAIT_SECONDS, checked_server_wait
from .worker_table import WorkerTable
from .wrappers import (
    is_begun_after_a_step,
    refuse_repeated_batches,
    refuse_resumes_without_state,
    refuse_wrappers_of_epochs,
    state_that_lightning_keeps,
)

_log = logging.getLogger("fletch")

#: The pause between two questions whether samples that other processes hold were consumed or came back, in
#: seconds: the first one, which then doubles, and the longest one.
_ASK_FIRST_SECONDS, _ASK_AGAIN_SECONDS = 0.02, 0.5

#: The number of these pauses after which a warning is logged.
_PAUSES_PER_WARNING = 120


class EpochDataset(EpochConsumption):
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
        self.rank, self.ranks = rank_of(rank, ranks)
        if not 1 <= batch_size <= _native.LEASE_MAX:
            raise Invalid(
                f"batch_size is {batch_size}; a batch is a lease, which has 1 to {_native.LEASE_MAX} samples"
            )
        if isinstance(epoch, str) and epoch != "next":
            raise Invalid(f'epoch is {epoch!r}; give the number of an epoch, or "next"')
        self.batch_size = batch_size
        self.transform = transform
        self.on_error = checked_on_error(on_error)
        self.content = checked_content_form(content)
        world: dict[str, Any] = {
            "ranks": self.ranks,
            "batch": batch_size * self.ranks,
            "tail": tail or ("keep" if self.ranks == 1 else "drop"),
        }
        chosen = plan_with_selection(plan, select)
        spec = spec_of(
            job, dataset, world, replay,
            order=order, visitation=visitation, seed=seed, plan=chosen, buckets=buckets,
        )
        #: The name of this process as the rank. Its workers inherit it.
        self._loader = RankLoader(take_over)
        self._server_wait = checked_server_wait(server_wait)
        mover = None if state is None else states.mover(client, job, self.rank, state)
        # Which epoch is next, only the job's server knows.
        describes = state is None and epoch != "next"
        self._declaration = Declaration(client, spec, self._loader, self._server_wait, mover, describes)
        info = self._declaration.described or self._job.info()
        self.job: str = info["name"]
        self._id: str = info["id"]
        self.root: str = info["root"]
        self._seed: int = info["seed"]
        self._tail: str = world["tail"]
        self._read_job(info)
        self._warned_of_small_sweep = False
        self._warn_of_small_sweep(info)
        self._earlier = EarlierProgress.of(self.job, self.ranks, info)
        version = client.resolve(f"{spec['dataset']}@{self.root}")
        self._keys = SampleKeys(version)
        self._visitation = visitation
        echo = (plan or {}).get("echo") or {}
        # The server keeps copies of a sample apart in the order of its grants, so the loop needs that order.
        self._fixed_order = order != "substitute" or echo.get("copies", 1) > 1
        self._replays = order == "replay"
        #: The epoch that a loaded state continues. A part of it was consumed before this process began.
        self._restored_epoch: int | None = None
        #: The number of states that this process loaded.
        self._loads = 0
        #: Whether this dataset goes on after the epochs that the job has finished.
        self._follows = isinstance(epoch, str)
        first = next_epoch(info["epochs"]) if isinstance(epoch, str) else epoch
        self._consumed_earlier = False
        #: Whether an iteration of a loop began in this process.
        self._has_iterated = False
        self._begin_epoch(first)
        self._acks.count_stalls(self._declaration.stalls)
        #: The number of iterations that began in this process.
        self._iterations = 0
        #: In a worker's copy: whether the process that made the worker has a batch in hand or unacknowledged.
        self._parent_has_unacked = False
        #: The loader's current iteration, if there is one.
        self._iteration: weakref.ref[Any] | None = None
        self._worker_table = WorkerTable(first, len(COUNTERS), len(self._acks.sum.bytes()))
        leave_at_end(self, self._loader, EpochDataset._end_with_process)
        if state is not None:
            self.load_state_dict(state)

    def _end_with_process(self) -> None:
        """Ends the iteration and gives the rank up, so that a restart need not wait for this process."""
        try:
            self._end_iteration()
        except RuntimeError as error:
            # A thread of the program still asks for a batch.
            _log.warning("job %s: its iteration goes on while the process ends: %s", self.job, error)
            return
        leave_now(self._loader)

    def _require_world(self) -> None:
        """Declares the job with this dataset's world, if that is not done.

        Raises if the server's world still differs.
        """
        if self._declaration.world_differs:
            self._acks.wait_for_server(lambda _: self._declaration.declare_world())
            self._acks.job = self._job
            self._read_job(self._acks.wait_for_server(lambda _: self._job.info()))

    def _read_job(self, info: dict[str, Any]) -> None:
        """Reads the length of an epoch of this rank from the server's description of the job."""
        self.steps, self._epoch_samples = self._declaration.length(info, self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration read this epoch.

        Without a call, the next epoch follows an epoch that ended.
        """
        self._read_worker_table()
        if epoch != self.epoch or self._over or self._has_all(0):
            self._leave_iteration()
            self._leave_epoch(epoch)

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
        self._require_world()
        if is_begun_after_a_step():
            self._acks.mark_consumed()
        self._leave_iteration()
        self._read_worker_table()
        if self._over or self._has_all(0):
            self._leave_epoch(self.epoch + 1)
        self._report_rest()

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

    def _leave_iteration(self) -> None:
        """Ends the current iteration.

        The server delivers the batch in hand again, unless it is the last of its epoch. A loop that counts
        its steps does not ask for a batch after the last one, though it made that step.
        """
        self._end_iteration()
        if self._has_all(self._acks.unacked_samples()):
            self._acks.mark_consumed()
        self._acks.drop()
        self._acks.flush_acks()
        self._acks.drop_lost()
        # The next iteration gets these samples first, if the server knows of them before it grants others.
        self._job.settle(_SETTLE_SECONDS)

    def _end_iteration(self) -> None:
        """Ends the loader's iteration, even if the caller still has a reference to it."""
        if self._iteration is not None and (iteration := self._iteration()) is not None:
            iteration.replace()

    # Methods of the process that receives samples.

    def _leases(
        self,
        worker: int,
        collate: Callable[[list[Any]], Any],
        prefetch: bool = False,
        journal: tuple[int, int, int] | None = None,
        releases_failed: bool = True,
    ) -> Generator[Batch, None, str]:
        """The leases of one worker: see `Receiver.leases`."""
        source = (self._job, self.job, self.epoch, self.rank, self.batch_size)
        makes = (self._keys, self.content, self.transform, self.on_error, self._seed)
        receiver = Receiver(*source, *makes, self._server_wait)
        return receiver.leases(worker, collate, prefetch, journal, releases_failed)

    def __iter__(self) -> Iterator[Any]:
        """Iterates single items, at most once: a batch is acknowledged before the loop gets its items."""
        # Torch calls this once for each iteration in each worker, and starts to read later, or never.
        self._refuse_wrappers()
        self._iterations += 1
        info = torch.utils.data.get_worker_info()
        if info is not None:
            end_with_parent()
        return items(self, info, self._iterations)

    def _wait_for_others(self, times: int) -> None:
        """Waits for a moment, because other processes hold what is left of the epoch.

        ``times`` counts the waits.
        """
        if times % _PAUSES_PER_WARNING == 0:
            seconds = times * _ASK_AGAIN_SECONDS
            _log.warning(
                "job %s, epoch %d: other processes have held the last samples for %.0f s; this rank waits "
                "until they acknowledge the samples or their leases expire",
                self.job,
                self.epoch,
                seconds,
            )
        # Samples that a process lets go come back at once.
        time.sleep(min(_ASK_FIRST_SECONDS * 2.0 ** min(times, 16), _ASK_AGAIN_SECONDS))

    # Methods of the training process.

    def _end_epoch(self) -> None:
        """Records that the epoch is over for this rank. The next iteration reads the next epoch."""
        self._finish()
        self._worker_table.set_epoch(self.epoch, over=True)
        if self._totals()[1].delivered == 0:
            self._report_empty_epoch()

    def _report_empty_epoch(self) -> None:
        """Reports that the epoch gave no sample: it was consumed before this process began.

        Raises:
            Invalid: the job finished the epoch before (``code == "epoch_closed"``), or its samples are fewer
                than one step.
        """
        if self.steps == 0 and not self._replays:
            step = self.batch_size * self.ranks
            raise Invalid(
                f"job {self.job}, epoch {self.epoch} has no batch: its samples are fewer than the {step} of "
                f"one step ({self.ranks} ranks of {self.batch_size}); give a smaller batch_size, or "
                'tail="pad"'
            )
        if self._replays or self._restored_epoch == self.epoch:
            why = "the replayed epoch" if self._replays else "the loaded state"
            _log.warning("job %s, epoch %d gave this rank no batch, as %s says", self.job, self.epoch, why)
            return
        epochs = self._acks.wait_for_server(lambda _: self._job.info())["epochs"]
        refuse_finished_epoch(self.job, self.epoch, epochs)

    def _report_rest(self) -> None:
        """Logs once, on rank 0, that a begun epoch goes on though no state was loaded."""
        reported, self._has_iterated = self._has_iterated, True
        is_begun = self.epoch in self._earlier.acked and self._restored_epoch is None
        if reported or not is_begun or self.rank > 0 or self._replays:
            return
        info = self._acks.wait_for_server(lambda _: self._job.info())
        there = epoch_of(info, self.epoch)
        if there is not None and there["state"] != "finished":
            # A last step that is dropped is not delivered.
            samples = self._epoch_samples * self.ranks if self._tail == "drop" else info["entries"]
            report_rest(self.job, self.epoch, samples - there["acked"], samples)

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch, self-contained: it survives the loss of every server.

        Call it after the step, when the model is saved: the batch in hand counts as consumed. With several
        ranks, call it on all of them at the same step, and keep the result of rank 0: it has the steps of all
        ranks. Under ``torch.distributed`` rank 0 waits for that, 10 seconds at most; without it, call it once
        more on rank 0 after a barrier. ``state["finished"]`` says whether nothing is left of the epoch.

        Under visitation ``"checkpoint"`` the call is a commit, durable on the server when it returns, and
        `load_state_dict` rolls back to it. The server remembers the latest four commits of an epoch. An older
        one is restored from the state itself.
        """
        return states.save(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state_dict` was called, with any number of ranks.

        The server delivers later samples again. After a state of the end of an epoch the next epoch follows.
        The receipt sum continues too, if the state is of this rank and of the same number of ranks.

        If the server of the job is gone, the state moves the job to another server of the cluster.

        Rank 0 sends the state, and the number of ranks of this dataset, to the server. The other ranks must
        begin after that: under ``torch.distributed`` their calls wait for it, else use a barrier. A strict
        order continues as it would have run with these ranks from the start, if the state was taken between
        steps and a step of all ranks has the same number of samples.

        Raises:
            Invalid: the state is of another version or plan, and nothing changed. Or the order cannot
                continue with this number of ranks (``code == "mid_step"``, ``"bad_plan"``): the epoch is at
                the state, with its former ranks.
        """
        states.load(self, state)
