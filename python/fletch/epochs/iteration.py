"""The iteration of a loop over an epoch: hands out batches, and acknowledges each one.

Invariant: a batch that the loop did not get is not acknowledged, and its lease is released at the latest when
    the iteration ends.
"""

from __future__ import annotations

import inspect
import os
import time
from typing import TYPE_CHECKING, Any, Callable, Generator, Iterator

from .. import Unavailable
from .lease_stream import Batch

if TYPE_CHECKING:
    from .rank_epochs import RankEpochs


class EpochIteration(Iterator[Any]):
    """An iteration of the epochs of a rank.

    A rank has one at a time, the latest, because two would take each other's batches.

    Args:
        job: the job's name.
        batches: the batches, as `acknowledged_batches` yields them.
        again: what the program does to get another iteration, for an error.
    """

    def __init__(
        self, job: str, batches: Generator[Any, None, None], again: str = "iterate the loader again"
    ) -> None:
        self._job, self._batches, self._again = job, batches, again
        self._pid, self._replaced = os.getpid(), False

    def __next__(self) -> Any:
        if self._replaced:
            raise RuntimeError(
                f"job {self._job}: this iteration is over: another one of the same dataset began after it, "
                f"or set_epoch() or load_state_dict() was called; {self._again}"
            )
        try:
            return next(self._batches)
        except BaseException as error:
            # A signal handler raised after the generator yielded its batch: the loop never gets the batch.
            if inspect.getgeneratorstate(self._batches) == inspect.GEN_SUSPENDED:
                self._batches.throw(error)
            raise

    def close(self) -> None:
        """Ends the iteration. A batch in hand stays in hand."""
        self._batches.close()

    def replace(self) -> None:
        """Ends the iteration because another one begins.

        Asking this one for a batch is an error from now on.
        """
        if self._pid != os.getpid():
            # A fork copied this object. The iteration continues in the process where it began.
            return
        state = inspect.getgeneratorstate(self._batches)
        if state == inspect.GEN_RUNNING:
            raise RuntimeError(
                f"job {self._job}: another thread or a transform is asking an iteration of this dataset for "
                "a batch; wait until it has the batch"
            )
        self._replaced = self._replaced or state != inspect.GEN_CLOSED
        self.close()


def acknowledged_batches(
    data: RankEpochs,
    batches: Iterator[Batch],
    in_loop: bool,
    more: bool,
    end_workers: Callable[[], None] = lambda: None,
) -> Generator[Any, None, None]:
    """Yields batches to the loop. Acknowledges a batch when the loop asks for the next one.

    Args:
        data: the epochs, whose current one is read.
        batches: the leases of the epoch, until nothing is left of it.
        in_loop: whether the process of the loop itself prepares batches.
        more: whether the loop may go on with batches that are received already while the server is gone.
        end_workers: ends the processes that receive batches for the loop. They renew the leases that they
            hold, so they must not outlive a loop that was left.
    """
    data._mode = None if data._visitation != "at-most-once" else "at-most-once"
    data._acks.join(data.rank)
    asked, given = time.monotonic_ns(), True
    try:
        for batch in batches:
            if batch.token is None:
                # The server may have no lease for this rank until the held batches are acknowledged.
                data._acks.flush_acks(more)
                continue
            # The batch may have come late. Flush again, so that no batch goes out whose lease may have
            # expired.
            data._acks.flush_acks(more)
            given = False
            if batch.is_empty:
                # Every sample of it was skipped. It counts as consumed, and the loop goes on to the next one.
                is_held = data._acks.hand_out(batch, 0, in_loop=in_loop, is_stepped=False)
                given = True
                if not is_held:
                    continue
                data._acks.mark_consumed()
                data._acks.flush_acks(more)
                continue
            if not data._acks.hand_out(batch, time.monotonic_ns() - asked, in_loop=in_loop):
                given = True
                continue
            yield batch.content
            given = True
            data._acks.mark_consumed()
            data._acks.flush_acks(more)
            asked = time.monotonic_ns()
    except GeneratorExit:
        # The loop was left with a batch in hand. `state_dict` or the next iteration decides what happens to
        # it.
        raise
    except BaseException as error:
        if isinstance(error, Unavailable):
            # Whichever process waited for the server, the loop waited for it since it asked for a batch.
            data._acks.count_stalls([(asked, time.monotonic_ns())])
        if not given:
            # The error came between the worker and the loop, which never got the batch.
            data._acks.drop()
        raise
    finally:
        end_workers()
        data._acks.drop_lost()
    data._end_epoch()
