"""The rank of a process among the data-parallel consumers of a job, and the order of their calls.

Ranks meet in the key-value store of ``torch.distributed``, not in a collective. So a rank whose call another
rank leaves out gets an error, and takes part in no collective of the training.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from datetime import timedelta
from typing import Any

from .. import Invalid, Unavailable
from . import loaded_torch

#: The time that a rank waits until rank 0 has sent a state to the server, in seconds.
_LOAD_SECONDS = 300.0

#: The time that a rank waits for the value of the first one, which sends it at once, in seconds.
_FIRST_SECONDS = 30.0

#: The calls of `first_value` in this process, by job.
_firsts: Counter[str] = Counter()


def rank_of(rank: int | None, ranks: int | None) -> tuple[int, int]:
    """The rank and the number of ranks: the given ones, or those of ``torch.distributed``.

    Raises:
        Invalid: only one of the two is given, the rank is out of range, or ``WORLD_SIZE`` names several ranks
            and ``torch.distributed`` is not initialised.
    """
    if (rank is None) != (ranks is None):
        raise Invalid("give both rank and ranks, or none of them")
    if rank is not None and ranks is not None:
        if not 0 <= rank < ranks:
            raise Invalid(f"rank is {rank}; with ranks={ranks} it must be 0 to {ranks - 1}")
        return rank, ranks
    if (processes := loaded_torch.distributed()) is not None:
        return processes.get_rank(), processes.get_world_size()
    # torchrun and similar launchers set WORLD_SIZE.
    world = os.environ.get("WORLD_SIZE", "")
    if world.isdecimal() and int(world) > 1:
        raise Invalid(
            f"WORLD_SIZE is {world}, and torch.distributed is not initialised: every rank would be 0 of 1; "
            "make the dataset after torch.distributed.init_process_group, or give rank and ranks"
        )
    return 0, 1


def run_together(ranks: int) -> bool:
    """Whether the ranks are processes of ``torch.distributed``, which make their steps together."""
    processes = loaded_torch.distributed()
    return ranks > 1 and processes is not None and processes.get_world_size() >= ranks


def _store() -> Any:
    return loaded_torch.distributed().distributed_c10d._get_default_store()


def announce_load(job: str, number: int) -> None:
    """Tells the other ranks that the server has the state which rank 0 loaded as its ``number``-th one."""
    _store().set(_load_key(job, number), "done")


def await_load(job: str, number: int) -> None:
    """Waits until rank 0 has called `announce_load`.

    Raises:
        Unavailable: it has not called it within five minutes.
    """
    _await_key(
        _load_key(job, number),
        _LOAD_SECONDS,
        f"job {job}: rank 0 has not loaded a state within {_LOAD_SECONDS:.0f} s, and the other ranks begin "
        "after it: call load_state_dict() on every rank",
    )


def first_value(job: str, value: str) -> str:
    """The value of the rank that calls this first for a job. The n-th calls of all ranks belong together.

    Raises:
        Unavailable: the first rank has ended before it gave its value.
    """
    number = _firsts[job]
    _firsts[job] += 1
    key, store = f"fletch/{job}/first/{number}", _store()
    if store.add(f"{key}/calls", 1) == 1:
        store.set(key, value)
        return value
    _await_key(
        key,
        _FIRST_SECONDS,
        f"job {job}: the first rank has not said within {_FIRST_SECONDS:.0f} s what was consumed of the job",
    )
    return str(store.get(key).decode())


def _await_key(key: str, seconds: float, failure: str) -> None:
    """Waits for a key of the store.

    Raises:
        Unavailable: it is not there in time.
    """
    end, store = time.monotonic() + seconds, _store()
    while True:
        try:
            # Short waits, because Ctrl-C does not interrupt one.
            store.wait([key], timedelta(seconds=1))
            return
        except RuntimeError as error:
            if time.monotonic() > end:
                raise Unavailable(failure) from error


def _load_key(job: str, number: int) -> str:
    return f"fletch/{job}/load/{number}"
