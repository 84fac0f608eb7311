"""A server that goes and comes back. The loop gets no batch whose lease may have expired."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, Iterator

import pytest

from conftest import Server, in_child, serving, until
from fletch import Client, Invalid, Unavailable
from fletch.torch import DataLoader, EpochDataset
from fletch.epochs.ack_tracking import AckTracker
from fletch.epochs.lease_stream import Batch
from test_epochs import SAMPLES, epochs, make_tree, number, seen


def test_a_server_that_is_gone_is_waited_for(
    own_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    make_tree(own_server)
    caplog.set_level(logging.WARNING, "fletch")
    dataset = epochs(own_server, "gone")
    got: list[int] = []
    batches = iter(DataLoader(dataset))
    got += next(batches).tolist()
    own_server.kill()
    threading.Timer(5, own_server.start).start()
    got += seen(batches)
    assert sorted(got) == list(range(SAMPLES))
    stats = dataset.stats()
    assert stats["receipt"] == "agrees" and stats["stalled_seconds"] > 1
    assert any("waits for the server" in r.getMessage() for r in caplog.records)


def note_warnings(path: Path, worker: int = 0) -> logging.Handler:
    """Writes the warnings of this process to a file from now on."""
    handler = logging.FileHandler(path, delay=True)
    handler.setLevel(logging.WARNING)
    logging.getLogger("fletch").addHandler(handler)
    return handler


@pytest.mark.parametrize("method", [None, "fork", "spawn"])
def test_an_epoch_begins_when_the_server_is_back(
    own_server: Server, tmp_path: Path, method: str | None
) -> None:
    make_tree(own_server)
    timeout, said = 2.0, tmp_path / "said"
    client = Client(f"unix:{own_server.socket}", job="between", timeout=timeout)
    dataset = EpochDataset(client, "numbered", job="between", batch_size=8, transform=number)
    workers: dict[str, Any] = {} if method is None else {"num_workers": 1, "multiprocessing_context": method}
    loader = DataLoader(dataset, worker_init_fn=partial(note_warnings, said), **workers)
    assert sorted(seen(iter(loader))) == list(range(SAMPLES))
    own_server.kill()
    # Whoever forks has no connection, whether workers or others.
    in_child(lambda: True)

    def come_back() -> None:
        try:
            until("somebody waits", said.exists)
        finally:
            own_server.start()

    back = threading.Thread(target=come_back)
    back.start()
    handler = note_warnings(said)
    try:
        assert sorted(seen(iter(loader))) == list(range(SAMPLES))
    finally:
        logging.getLogger("fletch").removeHandler(handler)
        back.join()
    stats = dataset.stats()
    assert (stats["epoch"], stats["samples"]) == (1, SAMPLES)
    assert (stats["receipt"], stats["redelivered"]) == ("agrees", 0)
    assert stats["stalled_seconds"] > 0 and "waits for the server" in said.read_text()


@pytest.fixture
def patient_server() -> Iterator[Server]:
    """A server whose leases live longer than the test."""
    with serving("--limits-lease-ttl", "120s") as server:
        yield server


@pytest.mark.parametrize("order", ["substitute", "strict"])
def test_what_was_received_is_handed_out_while_the_server_is_gone(
    patient_server: Server, caplog: pytest.LogCaptureFixture, order: str
) -> None:
    server = patient_server
    make_tree(server)
    caplog.set_level(logging.WARNING, "fletch")
    dataset = epochs(server, "away", order=order)

    def granted() -> int:
        of = [e for e in dataset._job.info()["epochs"] if e["epoch"] == 0]
        return of[0]["acked"] + of[0]["held"] if of else 0

    batches = iter(DataLoader(dataset, num_workers=2, prefetch_factor=4))
    got = next(batches).tolist()
    # What a worker was granted earlier it has received when it asks for more: of nine batches at least seven.
    until("workers have received some batches", lambda: granted() >= 9 * dataset.batch_size)
    server.kill()
    # Should the loop wait for the server, it comes back, and the test fails.
    rescue = threading.Timer(40, server.start)
    rescue.start()
    for _ in range(3):
        got += next(batches).tolist()
    rescue.cancel()
    assert not server.lives()
    assert any("goes on without the server" in r.getMessage() for r in caplog.records)
    assert dataset.stats()["batches"] == 0, "nothing counts that is not acknowledged"
    server.start()
    got += seen(batches)
    assert sorted(got) == list(range(SAMPLES))
    stats = dataset.stats()
    assert (stats["receipt"], stats["redelivered"], stats["samples"]) == ("agrees", 0, SAMPLES)
    assert stats["stalled_seconds"] > 0
    assert any("the server is back" in r.getMessage() for r in caplog.records)


class Silent:
    """A job whose server is gone until `gone` is set to False, or until a call waits for it."""

    def __init__(self) -> None:
        self.gone = True
        self.acked: list[int] = []
        self.dropped: list[int] = []
        self.waited = 0

    def hold(self, token: Any, grant: bytes = b"") -> bool:
        return True

    def drop_lease(self, token: Any) -> None:
        self.dropped.append(token[2])

    def settle(self, within: float) -> bool:
        return True

    def ack(self, token: Any, times: Any, report: Any, within: float | None = None, *_: Any) -> Any:
        if self.gone and within is not None:
            raise Unavailable("gone", retryable=True)
        if self.gone:
            self.waited += 1
            self.gone = False
        self.acked.append(token[2])
        return {}


def test_nothing_is_handed_out_whose_lease_may_have_run_out() -> None:
    job, ttl_ms = Silent(), 3000
    acks = AckTracker(job, "job", 0, _ROOT)  # type: ignore[arg-type]
    begun = time.monotonic()
    lease = 0
    while job.waited == 0:
        lease += 1
        acks.hand_out(Batch((0, 0, lease, 1, ttl_ms), deliveries=_DELIVERY), 0)
        acks.mark_consumed()
        acks.flush_acks(more=True)
        assert time.monotonic() - begun < 30
        time.sleep(0.02)
    # Half of the time a lease lives it went on, and then it waited, and acknowledged in order.
    assert lease > 2 and time.monotonic() - begun >= ttl_ms / 2000
    assert job.acked == list(range(1, lease + 1)) and not acks.has_unacked()
    assert acks.counts["batches"] == acks.counts["samples"] == lease


def test_who_has_received_nothing_more_waits_at_once() -> None:
    job = Silent()
    acks = AckTracker(job, "job", 0, _ROOT)  # type: ignore[arg-type]
    acks.hand_out(Batch((0, 0, 1, 1, 60_000), deliveries=_DELIVERY), 0)
    acks.mark_consumed()
    assert acks.flush_acks() and (job.waited, job.acked) == (1, [1])


def test_what_is_refused_for_good_is_given_up_and_the_next_epoch_begins() -> None:
    job = Silent()
    acks = AckTracker(job, "job", 0, _ROOT)  # type: ignore[arg-type]
    for lease in (1, 2):
        acks.hand_out(Batch((0, 0, lease, 1, 60_000), deliveries=_DELIVERY), 0)
        acks.mark_consumed()
        acks.flush_acks(more=True)
    assert acks.has_unacked() and job.acked == []

    def closed(*_: Any) -> Any:
        raise Invalid("abandoned", code="epoch_closed")

    job.ack = closed  # type: ignore[method-assign]
    with pytest.raises(Invalid):
        acks.flush_acks()
    assert sorted(job.dropped) == [1, 2] and not acks.has_unacked() and acks.flush_acks()
    assert acks.counts["batches"] == 0


def test_an_interrupt_counts_a_batch_once() -> None:
    for at in itertools.count():
        job, calls = Silent(), itertools.count()
        job.gone = False
        acks = AckTracker(job, "job", 0, _ROOT)  # type: ignore[arg-type]
        acks.hand_out(Batch((0, 0, 1, 1, 60_000), deliveries=_DELIVERY), 0)
        acks.mark_consumed()

        def interrupt(*_: Any, calls: Any = calls, at: int = at) -> None:
            # Signals raise where a function begins.
            if next(calls) == at:
                raise KeyboardInterrupt

        sys.settrace(interrupt)
        try:
            acks.flush_acks()
            ended = True
        except KeyboardInterrupt:
            ended = False
        finally:
            sys.settrace(None)
        acks.flush_acks()
        assert (acks.sum.delivered, acks.counts["batches"]) == (1, 1), at
        if ended:
            break
    assert at > 3


def test_what_all_waited_for_is_counted_once() -> None:
    job = Silent()
    job.gone = False
    acks = AckTracker(job, "job", 0, _ROOT)  # type: ignore[arg-type]
    for lease, stalls in enumerate(([(10, 70), (80, 90)], [(12, 71)], [(60, 85), (95, 100)], []), 1):
        acks.hand_out(Batch((0, 0, lease, 1, 60_000), deliveries=_DELIVERY, stalls=stalls), 0)
        acks.mark_consumed()
        acks.flush_acks()
    # From 10 to 70, from 80 to 90, and from 95 to 100. Time before the end of the counted stalls is ignored.
    assert acks.counts["stalled_ns"] == 75 and acks.counts["batches"] == 4


def test_an_epoch_goes_on_in_another_world_with_workers_and_after_a_break(own_server: Server) -> None:
    make_tree(own_server)
    settings: dict[str, Any] = {"tail": "drop", "batch_size": 6}
    two = [epochs(own_server, "moves", rank=r, ranks=2, **settings) for r in range(2)]
    loops = [iter(DataLoader(d)) for d in two]
    before = [i for loop in loops for _ in range(3) for i in next(loop).tolist()]
    states = [d.state_dict() for d in two]
    del loops
    one = epochs(own_server, "moves", rank=0, ranks=1, tail="drop", batch_size=12)
    one.load_state_dict(states[1])
    # A loop that is left with a batch in hand leaves it to the next one, with workers as without.
    left = iter(DataLoader(one))
    next(left)
    left.close()  # type: ignore[attr-defined]
    rest = seen(iter(DataLoader(one, num_workers=2)))
    assert len(before) == 36 and sorted(before + rest) == sorted(set(before + rest))
    assert len(before + rest) == SAMPLES // 12 * 12
    assert one.stats()["redelivered"] == 0


_ROOT = "00" * 32
_DELIVERY = bytes(8 + 32 + 4)
