"""Epochs: the server chooses the sample, each exactly once, and a receipt proves it.

Invariant: what was acknowledged is in the sum of the receipt, and nothing else is.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import time
import weakref
from typing import Any, Callable, Generator, Iterator, Sequence

import torch.utils.data

from .. import Client, FletchError, Invalid, _native
from . import notes
from .consumed import COUNTED, Consumed
from .keyed import Keys
from .ranks import rank_of
from .receive import Batch, EpochSample, Receiver, Told
from .select import Selection, planned
from .shared import Shared

_log = logging.getLogger("fletch")

#: Between two questions whether what somebody else holds was consumed or came back, in seconds.
_AGAIN = 0.5

#: After so many of them the log says so.
_LONG = 120


class EpochDataset(torch.utils.data.IterableDataset[Any]):
    """One epoch after the other of a job, in an order that the server chooses.

    Give it to :class:`fletch.torch.DataLoader`, which acknowledges a batch when the loop asks for the next
    one (the last one of an epoch also when the next epoch begins): then every sample of the plan is delivered
    exactly once, whatever is killed. Iterated in any other way (torch's own loader with any workers, or directly,
    sample by sample) it is *at most once*: a sample is acknowledged as it is handed out, and `stats` says so.

    Args:
        client: whom to ask.
        dataset: ``NAME[@TAG or ROOT]``, resolved once when the job is first declared.
        job: the job's name. The same name with the same settings goes on with the same job; with another number of ranks
            only after `load_state_dict`. Settings are compared as they are written: ``photos`` and ``photos@v3`` differ.
        batch_size: samples of one step of one rank, at most 4,096 (those of a lease).
        transform: called with each `EpochSample`; what it returns is the item. Without one it is ``content``.
        rank, ranks: which of how many data-parallel consumers this is; from ``torch.distributed`` where that is
            initialised, else 0 of 1. Where ``WORLD_SIZE`` says that there are several, it must be, or they must be given.
        order: ``"substitute"`` (any sample that is still due will do: the fastest), ``"strict"`` (a permutation that the
            seed fixes), ``"bucketed"`` (strict, and all ranks' samples of one step are of one bucket) or ``"replay"`` (what
            each rank consumed of an earlier epoch, in that order).
        buckets: with ``order="bucketed"`` (or ``"replay"`` of such an epoch), what makes the buckets: ``{"lengths": [b0, b1, …]}`` (ascending bounds in bytes of a
            sample's files together), ``{"prefixes": ["de/", …]}`` (of its key: the first that fits, or none) or
            ``{"groups": [0, 2, …]}`` (a number below 65,536 for each sample of the version).
        replay: with ``order="replay"``, the `ledger` of that epoch, of a job with the same version, plan (or ``select``), buckets and number
            of ranks. Every epoch of the job delivers it.
        plan: which samples, as the ``plan`` of ``POST /v1/jobs``; all of them once when absent.
        select: which samples, as a file: the path of a Parquet or CSV file with a column ``key`` or ``number``, or a
            `Selection`. In place of the base of ``plan``.
        seed: where every random choice begins; when absent the hash of the job's name, or with ``replay`` the ledger's seed (no other
            can be given).
        tail: a last step that is not whole: ``"keep"`` (one rank), ``"drop"`` or ``"pad"``; by default ``"keep"`` for one
            rank and ``"drop"`` for several. Every rank gets the same number of steps.
        visitation: ``"exactly-once"``, ``"at-most-once"`` or ``"checkpoint"`` (`state_dict` commits, `load_state_dict` goes back to
            that commit: what came later is delivered again).
        epoch: the first epoch.

    A batch is what the loader's ``collate_fn`` makes of a list of items: tensors of shape ``(…)`` become one of shape
    ``(n, …)``, where n is `batch_size`, or less in a last step under ``tail="keep"``.

    While the server is gone the loop gets what workers received already, for half of the time that a lease lives (not with a
    ``timeout`` of the loader, which would end it); then the server is waited for. A line in the log (logger ``fletch``) says
    so, `stats` counts the seconds, and the epoch goes on when it is back.

    Raises:
        NotFound: no such dataset.
        Invalid: the settings cannot be (``code == "bad_plan"``; unknown keys are named), the file of `select` is no selection, a
            job of that name has other settings (``code == "job_differs"``), or the ledger is damaged
            or of something else (``code == "bad_ledger"``).
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
        epoch: int = 0,
    ) -> None:
        self.rank, self.ranks = rank_of(rank, ranks)
        if not 1 <= batch_size <= _native.LEASE_MAX:
            raise Invalid(f"batch_size is {batch_size}; a batch is a lease, which has 1 to {_native.LEASE_MAX} samples")
        self.batch_size = batch_size
        self.transform = transform
        self.epoch = epoch
        name, tag = _target(dataset)
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
        optional = {"version": tag, "seed": seed, "plan": planned(plan, select), "buckets": buckets}
        if replay is not None:
            optional["replay"] = {"ledger": base64.b64encode(replay).decode()}
        spec.update({key: value for key, value in optional.items() if value is not None})
        self._client, self._spec = client, spec
        self._moves = not self._declared()
        if self._moves:
            told = _native._world(client, job)
            world = spec["world"] if told is None else json.loads(told)
            # Only a job of other ranks may be moved to these.
            there = spec if world["ranks"] == self.ranks else {**spec, "world": world}
            self._job = _native._declare(client, json.dumps(there))
        info = self._job.info()
        self.job: str = info["name"]
        self.root: str = info["root"]
        self._says(info)
        version = client.resolve(f"{name}@{self.root}")
        self._keys = Keys(version) if version.sample_rule == "stem" else None
        self._visitation = visitation
        self._known = order != "substitute"
        self._replays = order == "replay"
        self._begin(epoch)
        self._turn = 0
        self._held_there = False
        #: The loader's iteration that runs, if one does.
        self._loop: weakref.ref[Any] | None = None
        self._shared = Shared(epoch, len(COUNTED), len(self._consumed.sum.bytes()))

    def _declared(self) -> bool:
        """Declares the job; whether it is so, or another world has it."""
        try:
            self._job = _native._declare(self._client, json.dumps(self._spec))
        except Invalid as error:
            if error.code != "job_differs":
                raise
            return False
        return True

    def _settle(self) -> None:
        """The job is in the world of this dataset, or this raises what is different."""
        if self._moves:
            spec = json.dumps(self._spec)
            self._job = self._consumed.job = self._consumed.patiently(lambda _: _native._declare(self._client, spec))
            self._moves = False
            self._says(self._consumed.patiently(lambda _: self._job.info()))

    def _says(self, info: dict[str, Any]) -> None:
        """What the server says of an epoch of this rank."""
        tail, entries, step = self._spec["world"]["tail"], info["entries"], self.batch_size * self.ranks
        #: Steps of an epoch of one rank.
        self.steps: int = info["steps"]
        if self._moves:
            # The server knows another number of ranks yet.
            self.steps = entries // step if tail == "drop" else -(-entries // step)
        whole = self.steps * self.batch_size
        # Its samples, those that fill up a last step included.
        self._share: int = min(whole, entries) if tail == "keep" else whole

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        self._consumed = Consumed(self._job, self.job, epoch, self.root)
        self._receipt: str | None = None
        self._agrees: bool | None = None
        self._over = False
        # Consumed of it before a state that another rank saved.
        self._before = 0
        self._mode: str | None = None

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next iteration is of. An epoch that ended is followed by the next one by itself."""
        self._learn()
        if epoch != self.epoch or self._over or self._has(0):
            self._leave()
            self._begin(epoch)
            self._shared.at(epoch)

    def __len__(self) -> int:
        """Samples of an epoch of this rank, those that fill up a last step included; with ``order="replay"`` it may be up to a
        batch more or fewer. `steps` is how many steps they are.
        """
        return self._share

    def _can_hold(self, workers: int, waiting: int) -> None:
        """Raises `Invalid` where a rank may not hold the batches of so many workers: the one that the loop waits for might
        be the one that is not to be had.
        """
        # Of each worker those that wait for the loop, one on its way, and one that waits for its turn; and the one in hand.
        held = min((workers * (waiting + 1 + self._known) + 1) * self.batch_size, self._share)
        if held > _native.HELD_MAX and self._visitation != "at-most-once":
            raise Invalid(
                f"{workers} workers with {waiting} batches each may hold {held} samples, and a rank may hold"
                f" {_native.HELD_MAX}: use fewer workers, or a smaller prefetch_factor or batch_size"
            )

    def __getstate__(self) -> dict[str, Any]:
        # A worker's copy receives; what was consumed is known where the loop runs.
        self._settle()
        own = dict.fromkeys(("_client", "_spec", "_consumed", "_receipt", "_loop"))
        return {**self.__dict__, **own, "_held_there": self._consumed.open()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin(self.epoch)

    def _start(self) -> None:
        """An iteration begins: of the next epoch, if this one is over."""
        self._settle()
        self._leave()
        self._learn()
        if self._over or self._has(0):
            self._begin(self.epoch + 1)
            self._shared.at(self.epoch)

    def _leave(self) -> None:
        """The loop begins anew. What it was left with is delivered again, unless it is the last batch of its epoch: a loop that
        counts its steps does not ask for one more, and that step was made.
        """
        self._end_loop()
        if self._has(self._consumed.samples_open()):
            self._consumed.step()
        self._consumed.let_go()
        self._consumed.pay()
        self._consumed.hold_no_more()

    def _end_loop(self) -> None:
        """The loader's iteration that was left is over, though somebody keeps it."""
        if self._loop is not None and (loop := self._loop()) is not None:
            loop.replace()

    def _has(self, more: int) -> bool:
        """Whether what was consumed and so many samples more are all of the epoch that this rank gets. Nobody knows of a replay,
        which has what was consumed then.
        """
        consumed = self._before + self._by_all()[1].delivered + more
        return bool(0 < self._share == consumed and not self._replays)

    def _join(self, info: Any, turn: int) -> None:
        """An iteration begins in a worker of torch's own loader: of the epoch that all its workers find."""
        self._settle()
        held, self._held_there = self._consumed.open() or self._held_there, False
        if held:
            raise Invalid(
                f"job {self.job}: a loop over fletch.torch.DataLoader was left with a batch in hand, which this loader's "
                "workers would wait for; go on with that loader, or call state_dict(), which counts it as consumed"
            )
        epoch, counts, total = self._shared.join(info, turn, self._is_finished)
        self._begin(epoch)
        self._consumed.counts = dict(zip(COUNTED, counts))
        if total is not None:
            self._consumed.sum.merge(total)

    def _there(self, epoch: int) -> dict[str, Any] | None:
        """An epoch as the server has it, if it has begun and is remembered."""
        epochs = self._consumed.patiently(lambda _: self._job.info())["epochs"]
        return next((e for e in epochs if e["epoch"] == epoch), None)

    def _is_finished(self, epoch: int) -> bool:
        """Whether nothing is left of an epoch, for any rank, as the server says."""
        there = self._there(epoch)
        return there is not None and there["state"] == "finished"

    def _learn(self) -> None:
        """How far workers of torch's own loader are: nobody told this process when they began."""
        if torch.utils.data.get_worker_info() is not None:
            return
        latest = self._shared.latest()
        if latest.epoch != self.epoch:
            self._begin(latest.epoch)
        if latest.workers > 0:
            self._mode = "at-most-once"
            if latest.over and not self._over:
                self._finished()

    def _by_all(self) -> tuple[dict[str, int], Any]:
        """What was consumed of the epoch, by this process and by workers of torch's own loader: counted, and added up."""
        if torch.utils.data.get_worker_info() is not None:
            return self._consumed.counts, self._consumed.sum
        counts, sums = self._shared.consumed()
        total = _native.Sum(self.root)
        for one in (self._consumed.sum.bytes(), *sums):
            total.merge(one)
        return {key: self._consumed.counts[key] + more for key, more in zip(COUNTED, counts)}, total

    # What runs where the samples are received.

    def _leases(
        self, worker: int, collate: Callable[[list[Any]], Any], ahead: bool = False
    ) -> Generator[Batch, None, str]:
        """What a worker receives of the epoch: see `Receiver.leases`."""
        receiver = Receiver(self._job, self.job, self.epoch, self.rank, self.batch_size, self._keys, self.transform)
        return receiver.leases(worker, collate, ahead)

    def __iter__(self) -> Iterator[Any]:
        """Single items, at most once: each batch is acknowledged before its items are handed out."""
        # Torch calls this once an iteration in each worker, and begins to read later, or never.
        self._turn += 1
        return self._items(torch.utils.data.get_worker_info(), self._turn)

    def _items(self, info: Any, turn: int) -> Iterator[Any]:
        if info is None:
            # A loop that stopped with the last batch did not see the end.
            if self._consumed.counts["samples"] > 0 and not self._over and self._is_finished(self.epoch):
                self._ended()
            self._start()
        else:
            self._join(info, turn)
        self._mode = "at-most-once"
        waited = 0
        while True:
            leases = Told(self._leases(0 if info is None else info.id, list))
            for batch in leases:
                if batch.token is not None:
                    items = batch.content
                    self._consumed.take(batch, 0)
                    self._consumed.step()
                    if not self._consumed.pay():
                        continue
                    if info is not None:
                        counts = [self._consumed.counts[key] for key in COUNTED]
                        self._shared.publish(info.id, counts, self._consumed.sum.bytes())
                    yield from items
            if leases.last == "done":
                break
            # What is left is in other hands: nobody acknowledges late here, so it is done soon, or its holder was killed.
            waited += 1
            self._wait_for_others(waited)
        if info is None:
            self._ended()
        else:
            self._shared.end(info.id)
            # Once for all workers, of which some may have come too late for anything.
            if info.id == 0 and not any(self._shared.consumed()[0]):
                self._say_that_it_was_empty()

    def _wait_for_others(self, times: int) -> None:
        """Waits for a moment, so many times now: somebody else holds what is left."""
        if times % _LONG == 0:
            seconds = times * _AGAIN
            _log.warning("job %s, epoch %d: somebody else holds what is left, for %.0f s", self.job, self.epoch, seconds)
        time.sleep(_AGAIN)

    # What runs in the process that steps.

    def _ended(self) -> None:
        """The epoch is over for this rank, as this process saw, and the next one is next."""
        self._finished()
        self._shared.at(self.epoch, over=True)
        if self._by_all()[1].delivered == 0:
            self._say_that_it_was_empty()

    def _say_that_it_was_empty(self) -> None:
        """An epoch of which nothing came was consumed before this process began, unless it has no step."""
        if self.steps > 0:
            _log.warning(
                "job %s, epoch %d was finished before, and gave no batch: to begin anew give another job name; to go on, "
                "load_state_dict() with what was saved, or set_epoch()",
                self.job,
                self.epoch,
            )

    def _finished(self) -> None:
        """What is proved of an epoch that is over is kept."""
        if self.ranks == 1:
            self._receipt = self._consumed.patiently(lambda _: self._job.receipt(self.epoch))
        self._over = True

    def received(self) -> bytes:
        """What this rank consumed of the epoch, added up: for `verify` on another rank."""
        self._learn()
        return bytes(self._by_all()[1].bytes())

    def verify(self, others: Sequence[bytes] = ()) -> bool:
        """Whether the ranks together consumed exactly what the plan of the finished epoch says.

        Args:
            others: `received` of every other rank.

        Raises:
            Invalid: the epoch is not finished (``code == "epoch_open"``).
        """
        mine = self.received()
        if self._receipt is None:
            self._receipt = self._consumed.patiently(lambda _: self._job.receipt(self.epoch))
        total = _native.Sum(self.root)
        for one in (mine, *others):
            total.merge(one)
        self._agrees = total.agrees(self._receipt)
        return self._agrees

    def stats(self) -> dict[str, Any]:
        """What this rank consumed of the current epoch, and the proof.

        Returns:
            ``visitation`` (what holds: ``"at-most-once"`` unless the loop runs over `fletch.torch.DataLoader`), ``batches``,
            ``samples``, ``bytes``, ``redelivered`` (samples whose lease ran out before they were acknowledged),
            ``waited_seconds`` (for batches), ``stalled_seconds`` (the server was gone),
            ``stepped_seconds``; and once the epoch ended for all ranks ``certificate`` (how well it was shuffled) and
            ``receipt`` (``"agrees"`` or ``"differs"``; of several ranks what `verify` said last), else ``None``.
        """
        self._learn()
        counts, total = self._by_all()
        if (self._over or self._has(0)) and self._receipt is None:
            self._ask_for_receipt()
        receipt = None if self._receipt is None else json.loads(self._receipt)
        agrees = self._agrees
        if receipt is not None and self.ranks == 1:
            agrees = total.agrees(self._receipt)
        return {
            "job": self.job,
            "epoch": self.epoch,
            "rank": self.rank,
            "ranks": self.ranks,
            "visitation": self._mode or self._visitation,
            **{key: counts[key] for key in COUNTED[:4]},
            **{f"{k}_seconds": counts[f"{k}_ns"] / 1e9 for k in ("waited", "stalled", "stepped")},
            "receipt": None if agrees is None else "agrees" if agrees else "differs",
            "certificate": None if receipt is None else receipt["certificate"],
        }

    def _ask_for_receipt(self) -> None:
        """The receipt of an epoch that is over for this rank, if it is for all others and the server is there."""
        try:
            self._receipt = self._job.receipt(self.epoch)
        except FletchError as error:
            # One that a state was loaded of may not be there yet, or be forgotten.
            if not error.retryable and error.code not in ("epoch_open", "epoch_closed", "not_found"):
                raise

    def save_received(self, path: str | os.PathLike[str]) -> None:
        """Writes down what this rank consumed of the epoch, added up, as a file of notes: ``fletch receipt verify`` holds
        those of all ranks against the receipt. The file is whole or not there.
        """
        said = self.received()
        delivered, value = int.from_bytes(said[:8], "little"), said[8:].hex()
        text = f"{notes.head(self.root, self.epoch)}sum {delivered} {value}\n"
        part = f"{os.fspath(path)}.part"
        with open(part, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)

    def append_notes(self, path: str | os.PathLike[str]) -> None:
        """Writes down, sample by sample, that the batch in hand was consumed: lines at the end of a file of notes, durable when
        this returns. ``fletch receipt verify`` holds the files of all processes against the receipt, whatever was killed.

        Call it once a batch, after its step, before the next one is asked for and before `state_dict`. A file is of one
        epoch, and of one process at a time; one that was killed may be followed by another with the same file.

        Raises:
            Invalid: there is no batch in hand (there is one in a loop over `fletch.torch.DataLoader` only), or the file is none of
                this epoch.
            OSError: the file cannot be written.
        """
        batch = self._consumed.in_hand()
        if batch is None:
            raise Invalid(f"job {self.job}: there is no batch in hand to write down")
        notes.append(path, notes.head(self.root, self.epoch), notes.lines(batch))

    def ledger(self, epoch: int | None = None) -> bytes:
        """The log of an epoch, the current one when absent: what was granted to whom, and acknowledged. It can be
        replayed (``order="replay"``). Of an epoch that a state was loaded of it has only what came after that state.

        Raises:
            NotFound: the epoch has not begun, or is forgotten.
        """
        self._learn()
        number = self.epoch if epoch is None else epoch
        return bytes(self._consumed.patiently(lambda _: self._job.ledger(number)))

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch is, self-contained: it survives the loss of every server; ``"finished"`` in it says whether
        nothing is left of it. Call it after the step, when the model is saved: the batch in hand counts as consumed. With
        several ranks call it on all of them at the same step; after a barrier, what rank 0 gets by calling it once more
        has the steps of all.

        Under visitation ``"checkpoint"`` it is a commit, durable on the server when this returns, and
        `load_state_dict` goes back to it. The server remembers the latest four of an epoch; an older one goes back by the
        state itself.
        """
        self._learn()
        self._consumed.step()
        self._consumed.pay()
        there, commit = self._there(self.epoch), None
        if self._visitation == "checkpoint":
            # A number that says how far the epoch is (entries acknowledged by all ranks, pads included): the same place has
            # the same one, whoever asks.
            commit = 0 if there is None else there["acked"] + there["padded"]
            self._consumed.patiently(lambda _: self._job.checkpoint(self.epoch, commit))
        state = self._consumed.patiently(lambda _: self._job.state(self.epoch))
        return {
            "job": self.job,
            "root": self.root,
            "epoch": self.epoch,
            "state": state,
            "commit": commit,
            "finished": there is not None and there["state"] == "finished",
            "ranks": (self.rank, self.ranks),
            "received": self.received(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was called, with any number of ranks: what came later is delivered again. A state of the
        end of an epoch is followed by the next one. The proof of the epoch goes on too, where the state is this rank's own, of
        the same number of ranks.

        Rank 0 tells the server, also that there are as many ranks now as this dataset has; the other ranks must not begin
        before it did (a barrier). A strict order goes on as it would have gone on with these ranks from its start, where
        the state was taken between steps and the samples of a step of all ranks together are as many.

        Raises:
            Invalid: the state is of another version or plan: nothing changed. Or the order cannot go on with so many ranks
                from here (``code == "mid_step"``, ``"bad_plan"``): the epoch is where the state says, with as many as before.
        """
        if state["root"] != self.root:
            raise Invalid(f"the state is of version {state['root']}, the job reads {self.root}")
        if self.rank == 0 and not self._went_back(state):
            self._job.put_state(state["epoch"], state["state"], True)
        self._end_loop()
        self._consumed.let_go(owed=True)
        self._consumed.hold_no_more()
        self._begin(state["epoch"])
        rank, ranks = state.get("ranks", (None, None))
        if (rank, ranks) == (self.rank, self.ranks):
            self._consumed.sum.merge(state["received"])
        elif ranks == self.ranks:
            # It was saved at the same step of all ranks.
            self._before = int.from_bytes(state["received"][:8], "little")
        self._over = state.get("finished", False)
        self._shared.at(self.epoch)
        if self._over:
            self._shared.at(self.epoch, over=True)
        if self.rank == 0 and self._moves:
            self._job.world(json.dumps(self._spec["world"]))
            self._settle()

    def _went_back(self, state: dict[str, Any]) -> bool:
        """Whether the server remembers the commit, and the epoch is there again."""
        if self._visitation != "checkpoint" or state.get("commit") is None:
            return False
        try:
            self._job.rollback(state["epoch"], state["commit"])
            # A server that lost what it knew may have a commit of that number that is another.
            return bool(self._job.state(state["epoch"]) == state["state"])
        except FletchError as error:
            if error.code in ("no_commit", "not_found"):
                return False
            raise


def _target(dataset: str) -> tuple[str, str | None]:
    head, slash, last = dataset.rpartition("/")
    name, at, tag = last.partition("@")
    return head + slash + name, tag if at else None
