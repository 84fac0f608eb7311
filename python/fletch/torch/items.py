"""Single items of an epoch, for every loader but that of this package.

Invariant: a sample is acknowledged before the loop gets it, so it is delivered at most once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterator

from .. import Invalid
from ..epochs.ack_tracking import COUNTERS
from ..epochs.lease_stream import BatchesWithStatus

if TYPE_CHECKING:
    from .epochs import EpochDataset

#: The time that a worker which got nothing waits to learn whether other workers got something, in seconds.
_OTHERS_SECONDS = 2.0


def items(data: EpochDataset, info: Any, turn: int) -> Iterator[Any]:
    """Yields the items of the current epoch, or of the next one if this one is over.

    Args:
        data: the dataset.
        info: the result of ``torch.utils.data.get_worker_info()``.
        turn: the number of iterations that began in this process.
    """
    if info is None:
        # A loop that stopped with the last batch did not see the end of the epoch.
        if data._acks.counts["samples"] > 0 and not data._over and data._is_finished(data.epoch):
            data._end_epoch()
        data._start_iteration()
        # This process acknowledges all that the rank consumes. Of several workers none does.
        data._acks.join(data.rank)
    else:
        _join_workers(data, info, turn)
    data._mode = "at-most-once"
    waited = 0
    while True:
        # A sibling worker would get the lease, acknowledge it at once, and send it to a loop that ended.
        own = data._leases(0 if info is None else info.id, list, releases_failed=info is None)
        leases = BatchesWithStatus(own)
        for batch in leases:
            if batch.token is not None:
                content = [] if batch.is_empty else batch.content
                if not data._acks.hand_out(batch, 0, is_stepped=False):
                    continue
                data._acks.mark_consumed()
                if not data._acks.flush_acks():
                    continue
                if info is not None:
                    counts = [data._acks.counts[key] for key in COUNTERS]
                    data._worker_table.publish(info.id, counts, data._acks.sum.bytes())
                yield from content
        if leases.status == "done":
            break
        # Other processes hold what is left. They acknowledge at once here, so they are done soon, unless they
        # were killed.
        waited += 1
        data._wait_for_others(waited)
    if info is None:
        data._end_epoch()
        return
    data._worker_table.end(info.id)
    # Worker 0 reports it for all workers. A worker that began late may have got nothing though others did.
    if info.id == 0 and data._worker_table.got_nothing(_OTHERS_SECONDS):
        data._report_empty_epoch()


def _join_workers(data: EpochDataset, info: Any, turn: int) -> None:
    """Begins an iteration in a worker of torch's own loader. All its workers agree on the epoch."""
    data._require_world()
    unacked, data._parent_has_unacked = data._acks.has_unacked() or data._parent_has_unacked, False
    if unacked:
        raise Invalid(
            f"job {data.job}: a loop over fletch.torch.DataLoader was left with a batch in hand, which this "
            "loader's workers would wait for; go on with that loader, or call state_dict(), which counts it "
            "as consumed"
        )
    is_first = not data._worker_table.has_run(but_for=info.seed - info.id)
    epoch, counts, total = data._worker_table.join(info, turn, data._is_finished)
    data._begin_epoch(epoch)
    data._acks.counts = dict(zip(COUNTERS, counts))
    if total is not None:
        data._acks.sum.merge(total)
    if info.id == 0 and is_first:
        data._report_rest()
