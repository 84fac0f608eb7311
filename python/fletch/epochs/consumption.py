"""What the process of the loop consumed of an epoch: its counters, its sums, and their proof.

Invariant: the receipt sum of a process contains the samples that it acknowledged, and no others.
"""

from __future__ import annotations

import os
from typing import Any, Sequence

from .. import Invalid, _native
from . import consumption_log
from .ack_tracking import COUNTERS, AckTracker
from .declaration import Declaration, warns_of_small_sweep
from .job_progress import epoch_of
from .proof import Proof
from .rank_loader import RankLoader


class EpochConsumption:
    """An epoch of a rank, and what was consumed of it.

    Attributes:
        job: the job's name.
        root: the version's identity, 64 hex digits.
        epoch: the number of the current epoch.
        rank, ranks: the process's rank, and the number of ranks.
    """

    job: str
    root: str
    epoch: int
    rank: int
    ranks: int
    _declaration: Declaration
    _loader: RankLoader
    _server_wait: float | None
    _visitation: str
    #: The samples of an epoch of this rank, including those that pad a last step.
    _epoch_samples: int
    _replays: bool
    _restored_epoch: int | None
    _warned_of_small_sweep: bool
    #: Whether this process consumed samples of an epoch before the current one.
    _consumed_earlier: bool

    @property
    def _job(self) -> _native.Job:
        return self._declaration.job

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._acks = AckTracker(
            self._job, self.job, epoch, self.root, server_wait=self._server_wait
        )
        only_rank = self.rank if self.ranks == 1 else None
        self._proof = Proof(self._acks, epoch, self._loader.id, only_rank)
        self._over = False
        #: The samples that this rank consumed before a state that another rank saved.
        self._consumed_before = 0
        #: After a state was loaded: the samples of all ranks, and of this one, that were consumed before it.
        self._loaded_at = (0, 0)
        #: The visitation of the current iteration, if it is not `_visitation`.
        self._mode: str | None = None

    def _leave_epoch(self, epoch: int) -> None:
        """Makes another epoch the current one."""
        self._consumed_earlier |= self._acks.counts["samples"] > 0
        self._begin_epoch(epoch)
        self._set_next_epoch(epoch)

    def _has_all(self, more: int) -> bool:
        """Whether the consumed samples and ``more`` samples are all samples of the epoch for this rank.

        False for a replay: its length is the number of samples that the rank consumed in the earlier epoch.
        """
        consumed = self._consumed_before + self._totals()[1].delivered + more
        return bool(0 < self._epoch_samples == consumed and not self._replays)

    def _is_done(self) -> bool:
        """Whether nothing is left of the current epoch for this rank, if the batch in hand is consumed."""
        return self._over or self._has_all(self._acks.unacked_samples())

    def _totals(self) -> tuple[dict[str, int], Any]:
        """The counters and the receipt sum of the epoch."""
        return self._acks.counts, self._acks.sum

    # What a subclass whose samples are also consumed by other processes does more.

    def _read_workers(self) -> None:
        """Reads the progress of processes that consume and acknowledge samples themselves. Here are none."""

    def _set_next_epoch(self, epoch: int, over: bool = False) -> None:
        """Tells such processes which epoch is read next; with ``over`` the one after it. Here are none."""

    def _server_epoch(self, epoch: int) -> dict[str, Any] | None:
        """The server's description of an epoch, if it has begun and the server remembers it."""
        info = self._acks.wait_for_server(lambda _: self._job.info())
        self._warn_of_small_sweep(info)
        return epoch_of(info, epoch)

    def _is_finished(self, epoch: int) -> bool:
        """Whether the server has finished an epoch, for all ranks."""
        there = self._server_epoch(epoch)
        return there is not None and there["state"] == "finished"

    def _warn_of_small_sweep(self, info: dict[str, Any]) -> None:
        """Warns once if the cache holds so few chunks that jobs share almost nothing."""
        if not self._warned_of_small_sweep:
            self._warned_of_small_sweep = warns_of_small_sweep(self.job, info)

    def _finish(self) -> None:
        """Marks the epoch as over, and gets its receipt."""
        if self.ranks == 1:
            self._proof.fetch()
        self._over = True

    def consumed_sum(self) -> bytes:
        """The receipt sum of the samples that this rank consumed of the epoch. `verify` takes it."""
        self._read_workers()
        return bytes(self._totals()[1].bytes())

    def verify(self, others: Sequence[bytes] = ()) -> bool:
        """Whether the ranks together consumed exactly the samples of the finished epoch's plan.

        Args:
            others: the `consumed_sum` of every other rank.

        Raises:
            Invalid: the epoch is not finished (``code == "epoch_open"``).
        """
        mine = self.consumed_sum()
        total = _native.ReceiptSum(self.root)
        for one in (mine, *others):
            total.merge(one)
        return self._proof.verify(total, self._restored_epoch == self.epoch)

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
        self._read_workers()
        counts, total = self._totals()
        if (self._over or self._has_all(0)) and not self._proof.is_there:
            self._proof.ask()
        return {
            "job": self.job,
            "epoch": self.epoch,
            "rank": self.rank,
            "ranks": self.ranks,
            "visitation": self._mode or self._visitation,
            **{key: counts[key] for key in COUNTERS[:6]},
            **{f"{k}_seconds": counts[f"{k}_ns"] / 1e9 for k in ("waited", "stalled", "stepped")},
            **self._proof.stats(total, self._restored_epoch == self.epoch),
        }

    def save_consumed_sum(self, path: str | os.PathLike[str]) -> None:
        """Writes the `consumed_sum` of this rank as a consumption log.

        The file is complete or does not exist. ``fletch receipt verify`` compares the files of all ranks with
        the receipt.
        """
        head = consumption_log.head(self.root, self.epoch)
        consumption_log.save_sum(path, head, self.consumed_sum())

    def append_consumption_log(self, path: str | os.PathLike[str]) -> None:
        """Appends a line for each sample of the batch in hand to a consumption log.

        The lines are durable when the call returns. ``fletch receipt verify`` compares the logs of all
        processes with the receipt, whichever process was killed.

        Call it once for each batch: after the step, and before the next batch is asked for and before
        `state_dict`. A log belongs to one epoch, and one process at a time writes it. After a process was
        killed, another may continue its log.

        Raises:
            Invalid: there is no batch in hand (only a loop over `fletch.torch.DataLoader` has one), or the
                file belongs to another epoch.
            OSError: the file cannot be written.
        """
        batch = self._acks.in_hand()
        if batch is None:
            raise Invalid(
                f"job {self.job}: there is no batch in hand to log; call append_consumption_log() in a loop "
                "over fletch.torch.DataLoader or fletch.Epochs, after the step"
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
        self._read_workers()
        number = self.epoch if epoch is None else epoch
        return bytes(self._acks.wait_for_server(lambda _: self._job.ledger(number)))
