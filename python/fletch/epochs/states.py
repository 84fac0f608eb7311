"""States: the progress of a job, saved with the model and loaded again.

Invariants:
    1. A state is a dict of strings, numbers, bytes and tuples: torch 2 loads it with ``weights_only=True``.
    2. A state of rank 0 has the steps of all ranks.
    3. Rank 0 sends a state to the server, and the other ranks begin after that.
"""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Any, Callable

from .. import Client, FletchError, Invalid, Unavailable, _native
from .ranks import announce_load, await_load, run_together
from .server_wait import Report

if TYPE_CHECKING:
    from .rank_epochs import RankEpochs

_log = logging.getLogger("fletch")

#: The time that `state_dict` waits for the other ranks' acks of the same step, and the pause between two
#: looks, in seconds.
_STATE_SECONDS, _STATE_PAUSE_SECONDS = 10.0, 0.02


def save(data: RankEpochs) -> dict[str, Any]:
    """See `RankEpochs.state_dict`."""
    data._read_workers()
    data._acks.mark_consumed()
    data._acks.flush_acks()
    _await_other_ranks(data)
    there, commit = data._server_epoch(data.epoch), None
    if data._visitation == "checkpoint":
        # The number of entries that all ranks acknowledged, padding included. So every rank gives the same
        # position the same number.
        commit = 0 if there is None else there["acked"] + there["padded"]
        data._acks.wait_for_server(lambda _: data._job.checkpoint(data.epoch, commit))
    state = data._acks.wait_for_server(lambda _: data._job.state(data.epoch))
    return {
        "job": data.job,
        "id": data._id,
        "root": data.root,
        "epoch": data.epoch,
        "state": state,
        "commit": commit,
        "finished": there is not None and there["state"] == "finished",
        "ranks": (data.rank, data.ranks),
        "received": data.consumed_sum(),
    }


def load(data: RankEpochs, state: dict[str, Any]) -> None:
    """See `RankEpochs.load_state_dict`."""
    if state["root"] != data.root:
        raise Invalid(f"the state is of version {state['root']}, the job reads {data.root}")
    if data.rank == 0 and not _roll_back(data, state):
        _put(data, state)
    data._end_iteration()
    data._acks.drop(unacked=True)
    data._acks.drop_lost()
    data._begin_epoch(state["epoch"])
    data._restored_epoch = data.epoch
    rank, ranks = state.get("ranks", (None, None))
    if (rank, ranks) == (data.rank, data.ranks):
        data._acks.sum.merge(state["received"])
    elif ranks == data.ranks:
        # All ranks saved their states at the same step.
        data._consumed_before = int.from_bytes(state["received"][:8], "little")
    data._over = state.get("finished", False)
    data._set_next_epoch(data.epoch)
    if data._over:
        data._set_next_epoch(data.epoch, over=True)
    if data.rank == 0 and data._declaration.world_differs:
        data._job.world(json.dumps(data._declaration.world))
        data._require_world()
    data._loads += 1
    if run_together(data.ranks):
        if data.rank == 0:
            data._loaded_at = (_acked_by_all(data), data._totals()[1].delivered)
            announce_load(data.job, data._loads)
        else:
            await_load(data.job, data._loads)


def _put(data: RankEpochs, state: dict[str, Any]) -> None:
    """Continues the epoch from the state. If the job's server is gone, the state moves the job first."""
    move = mover(data._declaration.client, data.job, data.rank, state)

    def put(_: Report) -> None:
        try:
            data._job.put_state(state["epoch"], state["state"], True)
        except Unavailable as error:
            if error.code != "job_waits" or move is None or not move():
                raise
            # It was deleted and has to be declared first, or it is there.
            data._job.put_state(state["epoch"], state["state"], True)

    data._acks.wait_for_server(put)


def mover(client: Client, job: str, rank: int, state: dict[str, Any]) -> Callable[[], bool] | None:
    """A function that moves the job of a state to another server if its server is gone.

    The function returns whether it moved the job. Rank 0 moves it, the other ranks wait for that.
    """
    job_id = state.get("id")
    if rank != 0 or state["job"] != job or job_id is None:
        return None

    def move() -> bool:
        try:
            _native._move_job(client, job_id, state["epoch"], state["state"])
            _log.warning("job %s: its server is gone, and the state moved the job to another one", job)
        except FletchError as error:
            if error.code == "conflict":
                # It was declared with lists. The next declaration has them, and then the state is loaded.
                _native._delete_job(client, job_id)
            elif not error.retryable:
                raise
            else:
                return False
        return True

    return move


def _await_other_ranks(data: RankEpochs) -> None:
    """On rank 0, waits until the server has the acks of the other ranks for this rank's step."""
    counts_acks = data._visitation != "at-most-once" and not data._replays
    if data.rank > 0 or not counts_acks or not run_together(data.ranks):
        return
    before, own_before = data._loaded_at
    due = before + (data._totals()[1].delivered - own_before) * data.ranks
    end = time.monotonic() + _STATE_SECONDS
    while (missing := due - _acked_by_all(data)) > 0:
        if time.monotonic() > end:
            _log.warning(
                "job %s, epoch %d: the state lacks %d samples that other ranks have not acknowledged, so a "
                "restart delivers them again: call state_dict() on every rank at the same step",
                data.job, data.epoch, missing,
            )
            return
        time.sleep(_STATE_PAUSE_SECONDS)


def _acked_by_all(data: RankEpochs) -> int:
    """The samples of this epoch that all ranks acknowledged, including those that pad a last step."""
    there = data._server_epoch(data.epoch)
    return 0 if there is None else int(there["acked"] + there["padded"])


def _roll_back(data: RankEpochs, state: dict[str, Any]) -> bool:
    """Rolls the epoch back to the state's commit.

    Returns False if the server does not have that commit.
    """
    if data._visitation != "checkpoint" or state.get("commit") is None:
        return False
    try:
        data._job.rollback(state["epoch"], state["commit"])
        # A server that lost its state may have another commit with the same number.
        return bool(data._job.state(state["epoch"]) == state["state"])
    except FletchError as error:
        # The state itself moves a job whose server is gone.
        if error.code in ("no_commit", "not_found", "job_waits"):
            return False
        raise
