"""Epochs: the server chooses the order of the samples, and delivers each one exactly once with a receipt.

Invariant: the receipt sum of a process contains the samples that it acknowledged, and no others.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import time
import weakref
from typing import Any, Callable, Generator, Iterator, Literal, Sequence

import torch.utils.data

from .. import Client, FletchError, Invalid, _native
from . import consumption_log, receipt_difference
from .ack_tracking import COUNTERS, AckTracker
from .contents import ContentForm, checked_content_form
from .lease_stream import _SETTLE_SECONDS, Batch, BatchesWithStatus, EpochSample, Receiver
from .other_settings import hint_of_other_settings
from .rank_loader import RankLoader, leave_at_end, leave_now
from .ranks import announce_load, await_load, rank_of, run_together
from .sample_errors import OnError, checked_on_error
from .sample_keys import SampleKeys
from .selection import Selection, plan_with_selection
from .worker_table import WorkerTable
from .wrappers import (
    is_begun_after_a_step,
    refuse_repeated_batches,
    refuse_resumes_without_state,
    refuse_wrappers_of_epochs,
)

_log = logging.getLogger("fletch")

#: The pause between two questions whether samples that other processes hold were consumed or came back, in
#: seconds: the first one, which then doubles, and the longest one.
_ASK_FIRST_SECONDS, _ASK_AGAIN_SECONDS = 0.02, 0.5

#: The time that a worker which got nothing waits to learn whether other workers got something, in seconds.
_OTHERS_SECONDS = 2.0
#: A sweep with room for fewer units shares almost nothing, as `SWEEP_UNITS_MIN` of the server says.
_SWEEP_UNITS_MIN = 5

#: The time that `state_dict` waits for the other ranks' acks of the same step, and the pause between two
#: looks, in seconds.
_STATE_SECONDS, _STATE_PAUSE_SECONDS = 10.0, 0.02

#: The number of these pauses after which a warning is logged.
_PAUSES_PER_WARNING = 120


class EpochDataset(torch.utils.data.IterableDataset[Any]):
    """The epochs of a job, one after the other, in an order that the server chooses.

    Iterate it with :class:`fletch.torch.DataLoader`. That loader acknowledges a batch when the loop asks for
    the next one; it acknowledges the last batch of an epoch also when the next epoch begins. So every sample
    of the plan is delivered *exactly once*, whichever process is killed. Any other iteration (torch's own
    loader, or the dataset itself, sample by sample) is *at most once*: a sample is acknowledged before the
    loop gets it, and `stats` says so.

    A batch is what the loader's ``collate_fn`` makes of a list of items. Tensors of shape ``(…)`` become one
    of shape ``(n, …)``, where n is `batch_size`, or less in the last step under ``tail="keep"``.

    While the server is gone, the loop gets the batches that workers received already, for half of the time
    that a lease lives. Then it waits for the server. A loader with a ``timeout`` waits at once, because
    waiting workers would exceed the timeout. The logger ``fletch`` warns of it, `stats` counts the seconds,
    and the epoch continues when the server is back.

    **Not for validation, test or inference**: use `EvalDataset`. An iteration continues the epoch of the job.
    After a ``break``, an error, ``next(iter(loader))`` or a limit on the batches, the next iteration delivers
    the rest of that epoch, not a whole pass. The batches that were left come first: their leases are released
    at once. Only the leases of a process that was killed have to expire.

    Args:
        client: the client of the server.
        dataset: ``NAME[@TAG or ROOT]``, resolved once when the job is first declared.
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
        name, tag = _split_tag(dataset)
        spec: dict[str, Any] = {
            "name": job,
            "dataset": name,
            "order": order,
            "visitation": visitation,
            "world": {
                "ranks": self.ranks,
                "batch": batch_size * self.ranks,
                "tail": tail or ("keep" if self.ranks == 1 else "drop"),
            },
        }
        selected = plan_with_selection(plan, select)
        optional = {"version": tag, "seed": seed, "plan": selected, "buckets": buckets}
        if replay is not None:
            optional["replay"] = {"ledger": base64.b64encode(replay).decode()}
        spec.update({key: value for key, value in optional.items() if value is not None})
        self._client, self._spec = client, spec
        #: The name of this process as the rank. Its workers inherit it.
        self._loader = RankLoader(take_over)
        #: Whether the server's job has another number of ranks, which `load_state_dict` changes.
        self._world_differs = not self._declare()
        if self._world_differs:
            text = _native._world(client, job)
            world = spec["world"] if text is None else json.loads(text)
            # Only a job with another number of ranks may get a new world.
            current = spec if world["ranks"] == self.ranks else {**spec, "world": world}
            self._job = self._declared(current)
        info = self._job.info()
        self.job: str = info["name"]
        self.root: str = info["root"]
        self._seed: int = info["seed"]
        self._read_job(info)
        self._warned_of_small_sweep = False
        self._warn_of_small_sweep(info)
        version = client.resolve(f"{name}@{self.root}")
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
        first = _next_epoch(info["epochs"]) if isinstance(epoch, str) else epoch
        self._begin_epoch(first)
        #: The number of iterations that began in this process.
        self._iterations = 0
        #: In a worker's copy: whether the process that made the worker has a batch in hand or unacknowledged.
        self._parent_has_unacked = False
        #: The loader's current iteration, if there is one.
        self._iteration: weakref.ref[Any] | None = None
        self._worker_table = WorkerTable(first, len(COUNTERS), len(self._acks.sum.bytes()))
        leave_at_end(self, self._loader, EpochDataset._end_with_process)

    def _end_with_process(self) -> None:
        """Ends the iteration and gives the rank up, so that a restart need not wait for this process."""
        try:
            self._end_iteration()
        except RuntimeError as error:
            # A thread of the program still asks for a batch.
            _log.warning("job %s: its iteration goes on while the process ends: %s", self.job, error)
            return
        leave_now(self._loader)

    def _warn_of_small_sweep(self, info: dict[str, Any]) -> None:
        """Warns once if the cache holds so few chunks that jobs share almost nothing."""
        if self._warned_of_small_sweep:
            return
        sweep = info.get("sweep") or {}
        capacity, total, unit = (sweep.get(f"{key}_bytes", 0) for key in ("capacity", "total", "unit"))
        if unit and capacity < total and capacity // unit < _SWEEP_UNITS_MIN <= total // unit:
            self._warned_of_small_sweep = True
            _log.warning(
                "job %s: the server's sweep holds %d chunks of %d bytes, and below %d it shares almost "
                "nothing; give its cache more space, or pack the dataset with smaller chunks",
                self.job, capacity // unit, unit, _SWEEP_UNITS_MIN,
            )

    def _declare(self) -> bool:
        """Declares the job. Returns False if the server's job has other settings, such as another world."""
        try:
            self._job = self._loader.declare(self._client, self._spec)
        except Invalid as error:
            if error.code != "job_differs":
                raise
            return False
        return True

    def _declared(self, spec: dict[str, Any]) -> _native.Job:
        """Declares the job. An error of other settings names the argument that would make them the same."""
        try:
            return self._loader.declare(self._client, spec)
        except Invalid as error:
            if error.code != "job_differs":
                raise
            hint = hint_of_other_settings(error, self._spec["name"])
            raise Invalid(f"{error}: {hint}", error.code, hint) from None

    def _require_world(self) -> None:
        """Declares the job with this dataset's world, if that is not done.

        Raises if the server's world still differs.
        """
        if self._world_differs:
            job = self._acks.wait_for_server(lambda _: self._declared(self._spec))
            self._job = self._acks.job = job
            self._world_differs = False
            self._read_job(self._acks.wait_for_server(lambda _: self._job.info()))

    def _read_job(self, info: dict[str, Any]) -> None:
        """Reads the length of an epoch of this rank from the server's description of the job."""
        tail, entries, step = self._spec["world"]["tail"], info["entries"], self.batch_size * self.ranks
        self.steps: int = info["steps"]
        if self._world_differs:
            # The server still counts with another number of ranks.
            self.steps = entries // step if tail == "drop" else -(-entries // step)
        whole = self.steps * self.batch_size
        #: The samples of an epoch of this rank, including those that pad a last step.
        self._epoch_samples: int = min(whole, entries) if tail == "keep" else whole

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._acks = AckTracker(self._job, self.job, epoch, self.root)
        self._receipt: str | None = None
        self._agrees: bool | None = None
        #: What explains that the last `verify` did not agree.
        self._because: list[str] = []
        self._over = False
        #: The samples that this rank consumed before a state that another rank saved.
        self._consumed_before = 0
        #: After a state was loaded: the samples of all ranks, and of this one, that were consumed before it.
        self._loaded_at = (0, 0)
        #: The visitation of the current iteration, if it is not `_visitation`.
        self._mode: str | None = None

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration read this epoch.

        Without a call, the next epoch follows an epoch that ended.
        """
        self._read_worker_table()
        if epoch != self.epoch or self._over or self._has_all(0):
            self._leave_iteration()
            self._begin_epoch(epoch)
            self._worker_table.set_epoch(epoch)

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
        own = dict.fromkeys(("_client", "_spec", "_acks", "_receipt", "_iteration"))
        return {**self.__dict__, **own, "_parent_has_unacked": self._acks.has_unacked()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_epoch(self.epoch)

    def _start_iteration(self) -> None:
        """Begins an iteration of this epoch, or of the next one if this one is over."""
        self._refuse_trainers()
        self._require_world()
        if is_begun_after_a_step():
            self._acks.mark_consumed()
        self._leave_iteration()
        self._read_worker_table()
        if self._over or self._has_all(0):
            self._begin_epoch(self.epoch + 1)
            self._worker_table.set_epoch(self.epoch)

    def _refuse_wrappers(self) -> None:
        """Raises `Invalid` if a wrapper that would leave out samples begins an iteration."""
        refuse_wrappers_of_epochs(self.job, self.rank, self.ranks)
        self._refuse_trainers()

    def _refuse_trainers(self) -> None:
        """Raises `Invalid` if a trainer continues without a state, or wants the same batches again."""
        refuse_repeated_batches(self.job)
        if self._restored_epoch is None:
            refuse_resumes_without_state(self.job, self._is_first, self._has_begun)

    def _is_first(self) -> bool:
        """Whether no iteration of this dataset began before, and nobody chose its epoch."""
        return self._iterations == 0 and not self._follows and self._worker_table.is_unused()

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

    def _has_all(self, more: int) -> bool:
        """Whether the consumed samples and ``more`` samples are all samples of the epoch for this rank.

        False for a replay: its length is the number of samples that the rank consumed in the earlier epoch.
        """
        consumed = self._consumed_before + self._totals()[1].delivered + more
        return bool(0 < self._epoch_samples == consumed and not self._replays)

    def _join_workers(self, info: Any, turn: int) -> None:
        """Begins an iteration in a worker of torch's own loader. All its workers agree on the epoch."""
        self._require_world()
        unacked, self._parent_has_unacked = self._acks.has_unacked() or self._parent_has_unacked, False
        if unacked:
            raise Invalid(
                f"job {self.job}: a loop over fletch.torch.DataLoader was left with a batch in hand, which "
                "this loader's workers would wait for; go on with that loader, or call state_dict(), which "
                "counts it as consumed"
            )
        epoch, counts, total = self._worker_table.join(info, turn, self._is_finished)
        self._begin_epoch(epoch)
        self._acks.counts = dict(zip(COUNTERS, counts))
        if total is not None:
            self._acks.sum.merge(total)

    def _server_epoch(self, epoch: int) -> dict[str, Any] | None:
        """The server's description of an epoch, if it has begun and the server remembers it."""
        info = self._acks.wait_for_server(lambda _: self._job.info())
        self._warn_of_small_sweep(info)
        epochs = info["epochs"]
        return next((e for e in epochs if e["epoch"] == epoch), None)

    def _is_finished(self, epoch: int) -> bool:
        """Whether the server has finished an epoch, for all ranks."""
        there = self._server_epoch(epoch)
        return there is not None and there["state"] == "finished"

    def _read_worker_table(self) -> None:
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

    def _totals(self) -> tuple[dict[str, int], Any]:
        """The counters and the receipt sum of the epoch: of this process and of workers of torch's loader."""
        if torch.utils.data.get_worker_info() is not None:
            return self._acks.counts, self._acks.sum
        counts, sums = self._worker_table.consumed()
        total = _native.ReceiptSum(self.root)
        for one in (self._acks.sum.bytes(), *sums):
            total.merge(one)
        return {key: self._acks.counts[key] + more for key, more in zip(COUNTERS, counts)}, total

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
        receiver = Receiver(*source, *makes)
        return receiver.leases(worker, collate, prefetch, journal, releases_failed)

    def __iter__(self) -> Iterator[Any]:
        """Iterates single items, at most once: a batch is acknowledged before the loop gets its items."""
        # Torch calls this once for each iteration in each worker, and starts to read later, or never.
        self._refuse_wrappers()
        self._iterations += 1
        return self._items(torch.utils.data.get_worker_info(), self._iterations)

    def _items(self, info: Any, turn: int) -> Iterator[Any]:
        if info is None:
            # A loop that stopped with the last batch did not see the end of the epoch.
            if self._acks.counts["samples"] > 0 and not self._over and self._is_finished(self.epoch):
                self._end_epoch()
            self._start_iteration()
        else:
            self._join_workers(info, turn)
        self._mode = "at-most-once"
        waited = 0
        while True:
            # A sibling worker would get the lease, acknowledge it at once, and send it to a loop that ended.
            own = self._leases(0 if info is None else info.id, list, releases_failed=info is None)
            leases = BatchesWithStatus(own)
            for batch in leases:
                if batch.token is not None:
                    items = [] if batch.is_empty else batch.content
                    self._acks.hand_out(batch, 0, is_stepped=False)
                    self._acks.mark_consumed()
                    if not self._acks.flush_acks():
                        continue
                    if info is not None:
                        counts = [self._acks.counts[key] for key in COUNTERS]
                        self._worker_table.publish(info.id, counts, self._acks.sum.bytes())
                    yield from items
            if leases.status == "done":
                break
            # Other processes hold what is left. They acknowledge at once here, so they are done soon, unless
            # they were killed.
            waited += 1
            self._wait_for_others(waited)
        if info is None:
            self._end_epoch()
        else:
            self._worker_table.end(info.id)
            # Worker 0 reports it for all workers. A worker that began late may have got nothing though others
            # did.
            if info.id == 0 and self._worker_table.got_nothing(_OTHERS_SECONDS):
                self._report_empty_epoch()

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
        if not any(e["epoch"] == self.epoch and e["state"] == "finished" for e in epochs):
            # Other ranks still consume their shares of it.
            _log.warning(
                "job %s, epoch %d gave this rank no batch: its share was consumed before this process began",
                self.job,
                self.epoch,
            )
            return
        hint = (
            f'to train on, create the dataset with epoch="next" (now {_next_epoch(epochs)}); to restore a '
            "model, call load_state_dict() with its state; to start from the beginning, give another job "
            f"name, or delete the job (`fletch jobs delete {self.job}`)"
        )
        raise Invalid(
            f"job {self.job}, epoch {self.epoch} was finished before, so it has no batch: {hint}",
            "epoch_closed",
            hint,
        )

    def _finish(self) -> None:
        """Marks the epoch as over, and gets its receipt."""
        if self.ranks == 1:
            self._receipt = self._acks.wait_for_server(lambda _: self._job.receipt(self.epoch))
        self._over = True

    def consumed_sum(self) -> bytes:
        """The receipt sum of the samples that this rank consumed of the epoch. `verify` takes it."""
        self._read_worker_table()
        return bytes(self._totals()[1].bytes())

    def verify(self, others: Sequence[bytes] = ()) -> bool:
        """Whether the ranks together consumed exactly the samples of the finished epoch's plan.

        Args:
            others: the `consumed_sum` of every other rank.

        Raises:
            Invalid: the epoch is not finished (``code == "epoch_open"``).
        """
        mine = self.consumed_sum()
        if self._receipt is None:
            self._receipt = self._acks.wait_for_server(lambda _: self._job.receipt(self.epoch))
        total = _native.ReceiptSum(self.root)
        for one in (mine, *others):
            total.merge(one)
        self._agrees = total.agrees(self._receipt)
        self._because = [] if self._agrees else self._why_differs(json.loads(self._receipt), total)
        return self._agrees

    def stats(self) -> dict[str, Any]:
        """The counters of this rank in the current epoch, and the proof.

        Returns:
            A dict with ``job``, ``epoch``, ``rank``, ``ranks``, and

            - ``visitation``: the guarantee that holds; ``"at-most-once"`` unless the loop runs over
              `fletch.torch.DataLoader`.
            - ``batches``, ``samples``, ``bytes``: what was acknowledged.
            - ``shared_bytes``: the part of ``bytes`` that the server did not read from the origin for this
              epoch: another job, or an earlier epoch, had brought it.
            - ``skipped``: the part of ``samples`` that ``on_error`` left out.
            - ``redelivered``: samples whose lease expired before they were acknowledged.
            - ``waited_seconds``: the time that the loop waited for batches.
            - ``stalled_seconds``: the time that it waited for a server that was gone.
            - ``stepped_seconds``: the time of the steps.
            - ``receipt``: ``"agrees"`` or ``"differs"``, after the epoch ended for all ranks, else ``None``.
              With several ranks it is the result of the last `verify`.
            - ``differs_because``: what explains a receipt that differs, as a list of sentences: other
              processes of this rank, samples that a loaded state contains. Empty if none differs.
            - ``certificate``: the statistics of the shuffle, after the epoch ended for all ranks, else
              ``None``.
        """
        self._read_worker_table()
        counts, total = self._totals()
        if (self._over or self._has_all(0)) and self._receipt is None:
            self._ask_for_receipt()
        receipt = None if self._receipt is None else json.loads(self._receipt)
        agrees, because = self._agrees, self._because
        if receipt is not None and self.ranks == 1:
            agrees = total.agrees(self._receipt)
            because = [] if agrees else self._why_differs(receipt, total)
        return {
            "job": self.job,
            "epoch": self.epoch,
            "rank": self.rank,
            "ranks": self.ranks,
            "visitation": self._mode or self._visitation,
            **{key: counts[key] for key in COUNTERS[:6]},
            **{f"{k}_seconds": counts[f"{k}_ns"] / 1e9 for k in ("waited", "stalled", "stepped")},
            "receipt": None if agrees is None else "agrees" if agrees else "differs",
            "differs_because": because,
            "certificate": None if receipt is None else receipt["certificate"],
        }

    def _why_differs(self, receipt: dict[str, Any], total: Any) -> list[str]:
        """What explains that the consumed samples are not those of the receipt."""
        return receipt_difference.reasons(
            receipt,
            loader=self._loader.id,
            rank=self.rank if self.ranks == 1 else None,
            consumed=total.delivered,
            restored=self._restored_epoch == self.epoch,
        )

    def _ask_for_receipt(self) -> None:
        """Gets the receipt if the epoch is over for all ranks and the server is reachable."""
        try:
            self._receipt = self._job.receipt(self.epoch)
        except FletchError as error:
            # The epoch of a loaded state may not exist on the server yet, or the server may have forgotten
            # it.
            if not error.retryable and error.code not in ("epoch_open", "epoch_closed", "not_found"):
                raise

    def save_consumed_sum(self, path: str | os.PathLike[str]) -> None:
        """Writes the `consumed_sum` of this rank as a consumption log.

        The file is complete or does not exist. ``fletch receipt verify`` compares the files of all ranks with
        the receipt.
        """
        total = self.consumed_sum()
        delivered, value = int.from_bytes(total[:8], "little"), total[8:].hex()
        text = f"{consumption_log.head(self.root, self.epoch)}sum {delivered} {value}\n"
        part = f"{os.fspath(path)}.part"
        with open(part, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)

    def append_consumption_log(self, path: str | os.PathLike[str]) -> None:
        """Appends a line for each sample of the batch in hand to a consumption log.

        The lines are durable when the call returns. ``fletch receipt verify`` compares the logs of all
        processes with the receipt, whichever process was killed.

        Call it once for each batch: after the step, and before the next batch is asked for and before
            `state_dict`. A log
        belongs to one epoch, and one process at a time writes it. After a process was killed, another may
        continue its log.

        Raises:
            Invalid: there is no batch in hand (only a loop over `fletch.torch.DataLoader` has one), or the
                file belongs to another epoch.
            OSError: the file cannot be written.
        """
        batch = self._acks.in_hand()
        if batch is None:
            raise Invalid(
                f"job {self.job}: there is no batch in hand to log; call append_consumption_log() in a loop "
                "over fletch.torch.DataLoader, after the step"
            )
        head = consumption_log.head(self.root, self.epoch)
        consumption_log.append(path, head, consumption_log.lines(batch))

    def begin_step(self) -> None:
        """Says that the loop has prepared the batch in hand itself, and steps from now on.

        A loop that decodes or transforms its batches, beside the workers or in their place, calls this before
        it gives a batch to the model. So the server knows which part of the loop's time is preparation
        (``fletch jobs show``). Without a batch in hand it does nothing.
        """
        self._acks.begin_step()

    def ledger(self, epoch: int | None = None) -> bytes:
        """The ledger of an epoch: its grants and acknowledgements. By default of the current epoch.

        ``order="replay"`` repeats it. If a state of the epoch was loaded, the ledger has only what came after
        that state.

        Raises:
            NotFound: the epoch has not begun, or the server has forgotten it.
        """
        self._read_worker_table()
        number = self.epoch if epoch is None else epoch
        return bytes(self._acks.wait_for_server(lambda _: self._job.ledger(number)))

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
        self._read_worker_table()
        self._acks.mark_consumed()
        self._acks.flush_acks()
        self._await_other_ranks()
        there, commit = self._server_epoch(self.epoch), None
        if self._visitation == "checkpoint":
            # The number of entries that all ranks acknowledged, padding included. So every rank gives the
            # same position the same number.
            commit = 0 if there is None else there["acked"] + there["padded"]
            self._acks.wait_for_server(lambda _: self._job.checkpoint(self.epoch, commit))
        state = self._acks.wait_for_server(lambda _: self._job.state(self.epoch))
        return {
            "job": self.job,
            "root": self.root,
            "epoch": self.epoch,
            "state": state,
            "commit": commit,
            "finished": there is not None and there["state"] == "finished",
            "ranks": (self.rank, self.ranks),
            "received": self.consumed_sum(),
        }

    def _await_other_ranks(self) -> None:
        """On rank 0, waits until the server has the acks of the other ranks for this rank's step."""
        counts_acks = self._visitation != "at-most-once" and not self._replays
        if self.rank > 0 or not counts_acks or not run_together(self.ranks):
            return
        before, own_before = self._loaded_at
        due = before + (self._totals()[1].delivered - own_before) * self.ranks
        end = time.monotonic() + _STATE_SECONDS
        while (missing := due - self._acked_by_all()) > 0:
            if time.monotonic() > end:
                _log.warning(
                    "job %s, epoch %d: the state lacks %d samples that other ranks have not acknowledged, so "
                    "a restart delivers them again: call state_dict() on every rank at the same step",
                    self.job, self.epoch, missing,
                )
                return
            time.sleep(_STATE_PAUSE_SECONDS)

    def _acked_by_all(self) -> int:
        """The samples of this epoch that all ranks acknowledged, including those that pad a last step."""
        there = self._server_epoch(self.epoch)
        return 0 if there is None else int(there["acked"] + there["padded"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state_dict` was called, with any number of ranks.

        The server delivers later samples again. After a state of the end of an epoch the next epoch follows.
        The receipt sum continues too, if the state is of this rank and of the same number of ranks.

        Rank 0 sends the state, and the number of ranks of this dataset, to the server. The other ranks must
        begin after that: under ``torch.distributed`` their calls wait for it, else use a barrier. A strict
        order continues as it would have run with these ranks from the start, if the state was taken between
        steps and a step of all ranks has the same number of samples.

        Raises:
            Invalid: the state is of another version or plan, and nothing changed. Or the order cannot
                continue with this number of ranks (``code == "mid_step"``, ``"bad_plan"``): the epoch is at
                the state, with its former ranks.
        """
        if state["root"] != self.root:
            raise Invalid(f"the state is of version {state['root']}, the job reads {self.root}")
        if self.rank == 0 and not self._roll_back(state):
            self._job.put_state(state["epoch"], state["state"], True)
        self._end_iteration()
        self._acks.drop(unacked=True)
        self._acks.drop_lost()
        self._begin_epoch(state["epoch"])
        self._restored_epoch = self.epoch
        rank, ranks = state.get("ranks", (None, None))
        if (rank, ranks) == (self.rank, self.ranks):
            self._acks.sum.merge(state["received"])
        elif ranks == self.ranks:
            # All ranks saved their states at the same step.
            self._consumed_before = int.from_bytes(state["received"][:8], "little")
        self._over = state.get("finished", False)
        self._worker_table.set_epoch(self.epoch)
        if self._over:
            self._worker_table.set_epoch(self.epoch, over=True)
        if self.rank == 0 and self._world_differs:
            self._job.world(json.dumps(self._spec["world"]))
            self._require_world()
        self._loads += 1
        if run_together(self.ranks):
            if self.rank == 0:
                self._loaded_at = (self._acked_by_all(), self._totals()[1].delivered)
                announce_load(self.job, self._loads)
            else:
                await_load(self.job, self._loads)

    def _roll_back(self, state: dict[str, Any]) -> bool:
        """Rolls the epoch back to the state's commit.

        Returns False if the server does not have that commit.
        """
        if self._visitation != "checkpoint" or state.get("commit") is None:
            return False
        try:
            self._job.rollback(state["epoch"], state["commit"])
            # A server that lost its state may have another commit with the same number.
            return bool(self._job.state(state["epoch"]) == state["state"])
        except FletchError as error:
            if error.code in ("no_commit", "not_found"):
                return False
            raise


def _next_epoch(epochs: Sequence[dict[str, Any]]) -> int:
    """The number of the first epoch that a job has not finished, by the epochs that the server remembers."""
    open_ones = [e["epoch"] for e in epochs if e["state"] != "finished"]
    latest = max((e["epoch"] for e in epochs), default=-1)
    return int(latest if latest in open_ones else latest + 1)


def _split_tag(dataset: str) -> tuple[str, str | None]:
    head, slash, last = dataset.rpartition("/")
    name, at, tag = last.partition("@")
    return head + slash + name, tag if at else None
