"""The epochs of a job as one rank reads them: the declared job, its current epoch, and the way from one epoch
to the next.

Invariant: a rank has one iteration at a time, and no sample is requested before one begins.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from dataclasses import dataclass
from typing import Any, Callable, Generator, Literal

from .. import Client, Invalid, _native
from . import states
from .consumption import EpochConsumption
from .contents import ContentForm, checked_content_form
from .declaration import Declaration, spec_of
from .iteration import EpochIteration
from .job_progress import EarlierProgress, epoch_of, next_epoch, refuse_finished_epoch, report_rest
from .lease_stream import Batch, EpochSample, Receiver
from .rank_loader import RankLoader, leave_at_end, leave_now
from .ranks import rank_of
from .sample_errors import OnError, checked_on_error
from .sample_keys import SampleKeys
from .selection import Selection, plan_with_selection
from .server_wait import SERVER_WAIT_SECONDS, checked_server_wait

_log = logging.getLogger("fletch")

#: The seconds for which an iteration that begins waits until the server knows of the leases that the last
#: one dropped.
_SETTLE_SECONDS = 1.0

#: The pause between two questions whether samples that other processes hold were consumed or came back, in
#: seconds: the first one, which then doubles, and the longest one.
_ASK_FIRST_SECONDS, _ASK_AGAIN_SECONDS = 0.02, 0.5

#: The number of these pauses after which a warning is logged.
_PAUSES_PER_WARNING = 120


@dataclass(frozen=True)
class EpochSettings:
    """The settings of the epochs of a rank. `fletch.torch.EpochDataset` says what each of them means.

    With ``gives_samples`` the items are the samples themselves, with their seeds, and not their contents.
    """

    job: str
    batch_size: int
    rank: int | None = None
    ranks: int | None = None
    order: str = "substitute"
    buckets: dict[str, Any] | None = None
    replay: bytes | None = None
    plan: dict[str, Any] | None = None
    select: Selection | str | os.PathLike[str] | None = None
    seed: int | None = None
    tail: str | None = None
    visitation: str = "exactly-once"
    epoch: int | Literal["next"] = 0
    transform: Callable[[EpochSample], Any] | None = None
    on_error: OnError = "raise"
    content: ContentForm = None
    take_over: bool = False
    server_wait: float | None = SERVER_WAIT_SECONDS
    state: dict[str, Any] | None = None
    gives_samples: bool = False


class RankEpochs(EpochConsumption):
    """The epochs of a job, one after the other, as one rank reads them.

    A subclass makes iterations of it, and calls `_begin` at the end of its constructor.
    """

    #: What a program does to read the first epoch that the job has not finished, for an error.
    _go_on = 'create the dataset with epoch="next"'

    def __init__(self, client: Client, dataset: str, settings: EpochSettings) -> None:
        batch_size, epoch = settings.batch_size, settings.epoch
        self.rank, self.ranks = rank_of(settings.rank, settings.ranks)
        if not 1 <= batch_size <= _native.LEASE_MAX:
            raise Invalid(
                f"batch_size is {batch_size}; a batch is a lease, which has 1 to {_native.LEASE_MAX} samples"
            )
        if isinstance(epoch, str) and epoch != "next":
            raise Invalid(f'epoch is {epoch!r}; give the number of an epoch, or "next"')
        self.batch_size = batch_size
        self.transform = settings.transform
        self.on_error = checked_on_error(settings.on_error)
        self.content = checked_content_form(settings.content)
        self._gives_samples = settings.gives_samples
        world: dict[str, Any] = {
            "ranks": self.ranks,
            "batch": batch_size * self.ranks,
            "tail": settings.tail or ("keep" if self.ranks == 1 else "drop"),
        }
        spec = spec_of(
            settings.job,
            dataset,
            world,
            settings.replay,
            order=settings.order,
            visitation=settings.visitation,
            seed=settings.seed,
            plan=plan_with_selection(settings.plan, settings.select),
            buckets=settings.buckets,
        )
        #: The name of this process as the rank. Its workers inherit it.
        self._loader = RankLoader(settings.take_over)
        self._server_wait = checked_server_wait(settings.server_wait)
        state = settings.state
        mover = None if state is None else states.mover(client, settings.job, self.rank, state)
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
        self._visitation = settings.visitation
        echo = (settings.plan or {}).get("echo") or {}
        # The server keeps copies of a sample apart in the order of its grants, so the loop needs that order.
        self._fixed_order = settings.order != "substitute" or echo.get("copies", 1) > 1
        self._replays = settings.order == "replay"
        #: The epoch that a loaded state continues. A part of it was consumed before this process began.
        self._restored_epoch: int | None = None
        #: The number of states that this process loaded.
        self._loads = 0
        #: Whether this process goes on after the epochs that the job has finished.
        self._follows = isinstance(epoch, str)
        self._consumed_earlier = False
        #: Whether an iteration of a loop began in this process.
        self._has_iterated = False
        self._begin_epoch(next_epoch(info["epochs"]) if isinstance(epoch, str) else epoch)
        self._acks.count_stalls(self._declaration.stalls)
        #: The current iteration, if there is one.
        self._iteration: weakref.ref[EpochIteration] | None = None

    def _begin(self, state: dict[str, Any] | None) -> None:
        """Ends the constructor of a subclass: loads the state, if one is given."""
        leave_at_end(self, self._loader, RankEpochs._end_with_process)
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
        """Declares the job with the world of this process, if that is not done.

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
        self._read_workers()
        if epoch != self.epoch or self._over or self._has_all(0):
            self._leave_iteration()
            self._leave_epoch(epoch)

    def _start_iteration(self) -> None:
        """Begins an iteration of this epoch, or of the next one if this one is over."""
        self._require_world()
        self._leave_iteration()
        self._read_workers()
        if self._over or self._has_all(0):
            self._leave_epoch(self.epoch + 1)
        self._report_rest()

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
        """Ends the current iteration, even if the caller still has a reference to it."""
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
        receiver = Receiver(
            job=self._job,
            name=self.job,
            epoch=self.epoch,
            rank=self.rank,
            size=self.batch_size,
            keys=self._keys,
            content=self.content,
            transform=self.transform,
            on_error=self.on_error,
            seed=self._seed,
            gives_samples=self._gives_samples,
            server_wait=self._server_wait,
        )
        return receiver.leases(worker, collate, prefetch, journal, releases_failed)

    def _rest_of_leases(
        self, worker: int, collate: Callable[[list[Any]], Any]
    ) -> Generator[Batch, None, None]:
        """The leases of what other processes of the rank held, until nothing is left of the epoch."""
        self._acks.flush_acks()
        waited = 0
        while (yield from self._leases(worker, collate)) != "done":
            # The server has nothing more for this rank until the held batches are acknowledged.
            self._acks.flush_acks()
            waited += 1
            self._wait_for_others(waited)

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
        self._set_next_epoch(self.epoch, over=True)
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
        refuse_finished_epoch(self.job, self.epoch, epochs, self._go_on)

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
