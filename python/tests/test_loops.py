"""Loops that are left, interrupted, doubled or that fail. No sample is lost, no lease held for ever."""

from __future__ import annotations

import collections
import json
import logging
import re
import sys
import threading
import urllib.request
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any, Iterator

import pytest
import torch.utils.data

import fletch
from conftest import Server, serving, until
from fletch.epochs import lease_stream, rank_epochs
from fletch.torch import DataLoader, EpochSample
from test_epochs import SAMPLES, epochs, make_tree, number, seen


@pytest.fixture(scope="module")
def hasty() -> Iterator[Server]:
    """A server whose leases expire soon after their holders end."""
    with serving("--limits-lease-ttl", "3s") as server:
        make_tree(server)
        yield server


@pytest.fixture(scope="module")
def steady() -> Iterator[Server]:
    """A server whose leases live longer than a loop takes."""
    with serving("--limits-lease-ttl", "10s") as server:
        make_tree(server)
        yield server


def post(server: Server, path: str, body: dict[str, Any]) -> bytes:
    """The answer to a request of a client that names no loader."""
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        return bytes(answer.read())


@pytest.mark.parametrize("workers", [0, 2])
def test_the_latest_iteration_is_the_one(
    steady: Server, workers: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "fletch")
    monkeypatch.setattr(rank_epochs, "_PAUSES_PER_WARNING", 1)
    dataset = epochs(steady, f"latest-{workers}")
    loader = DataLoader(dataset, num_workers=workers)
    unasked, kept = iter(loader), iter(loader)
    got = next(kept).tolist()
    dataset.state_dict()
    # In hand, and never consumed: it comes again.
    next(kept)
    # A client that names no loader holds a batch, and lets it go while this loop waits for it.
    path = f"/v1/jobs/{dataset._job.info()['id']}/epochs/0"
    stream = post(steady, f"{path}/leases", {"rank": 0, "worker": 9, "sequence": 1, "want": 8})
    lease = re.search(rb'"lease":(\d+)', stream)
    assert lease is not None
    letting = threading.Timer(2.0, post, (steady, f"{path}/acks", {"rank": 0, "release": [int(lease[1])]}))
    letting.start()
    latest = iter(loader)
    for left in (unasked, kept):
        with pytest.raises(RuntimeError, match="this iteration is over: another one"):
            next(left)
    got += seen(latest)
    assert collections.Counter(got) == collections.Counter(range(SAMPLES))
    assert (dataset.stats()["receipt"], dataset.stats()["epoch"]) == ("agrees", 0)
    letting.join()
    assert any("other processes have held the last samples" in r.getMessage() for r in caplog.records)
    # One that came to its end has done so.
    assert next(latest, None) is None
    with pytest.raises(RuntimeError, match="this iteration is over"):
        list(zip(loader, loader))
    assert next(latest, None) is None


def test_what_an_interrupt_took_is_not_held(hasty: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, watching = epochs(hasty, "interrupted"), epochs(hasty, "interrupted")
    batches = iter(DataLoader(dataset))
    got = next(batches).tolist()
    wait_for_server, interrupts = lease_stream.wait_for_server, [KeyboardInterrupt()]

    def interrupted(label: str, call: Any, most: float | None) -> Any:
        answer = wait_for_server(label, call, most)
        # As if the signal had come when the call of the reader returned.
        if isinstance(call, partial) and interrupts:
            raise interrupts.pop()
        return answer

    monkeypatch.setattr(lease_stream, "wait_for_server", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert not interrupts
    until("nobody holds it", lambda: watching._job.info()["epochs"][0]["leases"] == 0, 30)
    got += seen(iter(DataLoader(dataset)))
    assert sorted(got) == list(range(SAMPLES)) and dataset.stats()["receipt"] == "agrees"


class Meeting:
    """A transform: worker 1 decodes after worker 0 has begun, and worker 0 after `let` exists."""

    def __init__(self, scratch: Path) -> None:
        self.begun, self.let = scratch / "begun", scratch / "let"

    def __call__(self, sample: EpochSample) -> int:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        if info.id == 0:
            self.begun.touch()
        until("the other one is there", (self.begun if info.id else self.let).exists)
        return number(sample)


def test_a_worker_lives_while_its_batches_wait(hasty: Server, tmp_path: Path) -> None:
    meeting = Meeting(tmp_path)
    # Four batches: each worker has one that it decodes, and one ahead.
    dataset = epochs(hasty, "waits", batch_size=-(-SAMPLES // 4), transform=meeting)
    batches: Any = iter(DataLoader(dataset, num_workers=2, prefetch_factor=4))
    made = batches._torch_iterator
    # Worker 1 told two batches, and its end.
    until("worker 1 has nothing more", lambda: made._worker_result_queue.qsize() >= 3)
    meeting.let.touch()
    got = next(batches).tolist()
    assert wait([w.sentinel for w in made._workers], 0.5) == [], "who ended does not renew"
    got += seen(batches)
    assert sorted(got) == list(range(SAMPLES)) and dataset.stats()["receipt"] == "agrees"
    assert all(w.exitcode == 0 for w in made._workers)


def refuses(sample: EpochSample) -> int:
    error = fletch.NotFound("there is no label", code="not_found", hint="label it", retryable=True)
    # What cannot be sent is left behind.
    error.sample = lambda: sample
    raise error


@pytest.mark.parametrize("order", ["substitute", "strict"])
def test_errors_of_workers_keep_what_they_say(hasty: Server, order: str) -> None:
    dataset = epochs(hasty, f"refuses-{order}", order=order, transform=refuses)
    with pytest.raises(fletch.NotFound) as error:
        list(DataLoader(dataset, num_workers=2))
    said = error.value
    assert (said.args, said.code) == (("there is no label",), "not_found")
    assert (said.hint, said.retryable) == ("label it", True)
    assert "in refuses" in said.__notes__[0] and "in worker" in said.__notes__[0]


def test_what_an_interrupt_took_on_the_last_step_is_not_acknowledged(hasty: Server) -> None:
    dataset = epochs(hasty, "last-step")
    batches = iter(DataLoader(dataset))
    first = next(batches).tolist()

    def interrupt(frame: FrameType, event: str, arg: object) -> None:
        if event == "c_return" and arg is next and frame.f_code.co_name == "__next__":
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            next(batches)
    finally:
        sys.setprofile(None)
    assert dataset.stats()["batches"] == 1
    # Whoever goes on with the same loop is at its end.
    first += [n for batch in batches for n in batch.tolist()]
    got = first + seen(iter(DataLoader(dataset)))
    assert sorted(got) == list(range(SAMPLES)) and dataset.stats()["receipt"] == "agrees"
