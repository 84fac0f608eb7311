"""The rank of a process among the data-parallel consumers of a job."""

from __future__ import annotations

import os

from .. import Invalid


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
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    # torchrun and similar launchers set WORLD_SIZE.
    world = os.environ.get("WORLD_SIZE", "")
    if world.isdecimal() and int(world) > 1:
        raise Invalid(
            f"WORLD_SIZE is {world}, and torch.distributed is not initialised: every rank would be 0 of 1; "
            "make the dataset after torch.distributed.init_process_group, or give rank and ranks"
        )
    return 0, 1
