"""What a loop lets go comes back at once: a lease lives for 30 s here, so a wait for an expiry would show."""

from __future__ import annotations

import collections
import gc
import subprocess
import sys
import time
import urllib.request
from typing import Any, Iterator

import pytest
import torch.utils.data

from conftest import Server, serving, until
from fletch.torch import DataLoader, EpochDataset, EpochSample
from fletch.epochs.ack_tracking import AckTracker
from fletch.epochs.lease_stream import Batch
from test_epochs import SAMPLES, epochs, make_tree, number

#: Longer than any batch takes on a busy machine, and far shorter than a lease lives.
AT_ONCE = 12.0


@pytest.fixture(scope="module")
def patient() -> Iterator[Server]:
    """A server with the default lifetime of leases: 30 s."""
    with serving() as server:
        make_tree(server)
        yield server


def entries(server: Server, event: str) -> int:
    """The entries of all epochs that the server counts for an event."""
    with urllib.request.urlopen(f"{server.url}/metrics") as page:
        lines = page.read().decode().splitlines()
    name = f'fletch_epoch_entries_total{{event="{event}"}} '
    return int(float(next(line for line in lines if line.startswith(name)).rpartition(" ")[2]))


def held(watching: EpochDataset) -> int:
    """The living leases of the first epoch of a job."""
    epochs = watching._job.info()["epochs"]
    return int(epochs[0]["leases"]) if epochs else 0


@pytest.mark.parametrize("order", ["substitute", "strict"])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_breaks_off_after_each_eighth_batch(
    patient: Server, workers: int, keeps: bool, order: str
) -> None:
    dataset = epochs(patient, f"breaks-{workers}-{keeps}-{order}", batch_size=2, order=order)
    loader = DataLoader(dataset, num_workers=workers)
    got: list[int] = []
    longest, breaks, ended = 0.0, 0, False
    while not ended:
        asked, ended = time.monotonic(), True
        for i, batch in enumerate(loader, 1):
            longest = max(longest, time.monotonic() - asked)
            if i == 8:
                if keeps:
                    # The batch in hand counts as consumed. Otherwise it comes again.
                    got += batch.tolist()
                    dataset.state_dict()
                breaks, ended = breaks + 1, False
                break
            got += batch.tolist()
            asked = time.monotonic()
    assert breaks >= 9 and longest < AT_ONCE, f"a batch took {longest:.1f} s"
    assert collections.Counter(got) == collections.Counter(range(SAMPLES))
    stats = dataset.stats()
    assert (stats["receipt"], stats["epoch"], stats["redelivered"]) == ("agrees", 0, 0)
    assert entries(patient, "expired") == 0 and (keeps and workers == 0 or entries(patient, "released") > 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_fails_or_peeks_holds_nothing(patient: Server, workers: int) -> None:
    name = f"peeks-{workers}"
    dataset, watching = epochs(patient, name), epochs(patient, name)
    loader = DataLoader(dataset, num_workers=workers)
    begun = time.monotonic()
    # The batch in hand stays held, because state_dict() may count it as consumed.
    next(iter(loader))
    until("only the batch in hand is held", lambda: held(watching) == 1, AT_ONCE)
    with pytest.raises(ZeroDivisionError):
        for _ in loader:
            raise ZeroDivisionError
    until("only the batch in hand is held", lambda: held(watching) == 1, AT_ONCE)
    kept: Any = iter(loader)
    next(kept)
    kept.close()
    until("only the batch in hand is held", lambda: held(watching) == 1, AT_ONCE)
    # Nothing has asked for a batch of this iteration, and its workers have leases.
    unasked = iter(loader)
    if workers:
        until("its workers received some", lambda: held(watching) >= 2)
    del unasked
    until("nobody holds a lease", lambda: held(watching) == 0, AT_ONCE)
    next(iter(loader))
    # A dataset that is gone lets its batch in hand go.
    del loader, dataset, kept
    gc.collect()
    until("nobody holds a lease", lambda: held(watching) == 0, AT_ONCE)
    got = [n for batch in DataLoader(watching) for n in batch.tolist()]
    assert sorted(got) == list(range(SAMPLES)) and watching.stats()["receipt"] == "agrees"
    assert time.monotonic() - begun < 25, "nothing waited for an expiry"
    assert entries(patient, "expired") == 0


def fails_at_40(sample: EpochSample) -> int:
    if number(sample) == 40:
        raise ValueError("sample 40 is broken")
    return number(sample)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_sample_does_not_hold_the_others(patient: Server, workers: int) -> None:
    name = f"broken-{workers}"
    dataset, watching = epochs(patient, name, transform=fails_at_40, order="strict"), epochs(
        patient, name, order="strict"
    )
    got: list[int] = []
    with pytest.raises(ValueError, match="sample 40 is broken"):
        for batch in DataLoader(dataset, num_workers=workers):
            got += batch.tolist()
    until("nobody holds a lease", lambda: held(watching) == 0, AT_ONCE)
    got += [n for batch in DataLoader(watching, num_workers=workers) for n in batch.tolist()]
    assert sorted(got) == list(range(SAMPLES)), "each once, in two processes of the job"
    assert watching._job.info()["epochs"][0]["state"] == "finished" and entries(patient, "expired") == 0


class Sticks:
    """A transform that does not return in worker 1."""

    def __call__(self, sample: EpochSample) -> int:
        info = torch.utils.data.get_worker_info()
        if info is not None and info.id == 1:
            time.sleep(600)
        return number(sample)


def test_workers_that_torch_kills_leave_no_lease(patient: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data import _utils

    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
    dataset, watching = epochs(patient, "sticks", transform=Sticks()), epochs(patient, "sticks")
    batches: Any = iter(DataLoader(dataset, num_workers=2))
    got = next(batches).tolist()
    workers = batches._torch_iterator._workers
    # Of worker 0: the one in hand, two in the queue, two ahead. Of worker 1: one that it decodes, two ahead.
    until("both received what they may", lambda: held(watching) >= 8)
    batches.close()
    # Worker 1 sleeps for ten minutes, so it ends by torch's signal only.
    until("both ended", lambda: not any(w.is_alive() for w in workers), AT_ONCE)
    dataset.state_dict()
    until("nobody holds a lease", lambda: held(watching) == 0, AT_ONCE)
    got += [n for batch in DataLoader(watching) for n in batch.tolist()]
    assert sorted(got) == list(range(SAMPLES)) and entries(patient, "expired") == 0


SCRIPT = """
import sys
import fletch
from fletch.torch import DataLoader, EpochDataset

def item(sample):
    if sys.argv[4] == "fails" and sample.number == 41:
        raise ValueError("sample 41 is broken")
    return sample.number

dataset = EpochDataset(fletch.Client(sys.argv[1]), "numbered", job=sys.argv[2], batch_size=4, transform=item)
for i, batch in enumerate(DataLoader(dataset, num_workers=int(sys.argv[3]))):
    if sys.argv[4] == "breaks" and i == 3:
        break
    if sys.argv[4] == "exits" and i == 3:
        sys.exit(3)
"""


@pytest.mark.parametrize("way", ["breaks", "exits", "fails"])
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_program_that_ends_holds_nothing(patient: Server, workers: str, way: str) -> None:
    name = f"program-{workers}-{way}"
    watching = epochs(patient, name, batch_size=4, order="substitute")
    command = [sys.executable, "-c", SCRIPT, f"unix:{patient.socket}", name, workers, way]
    ended = subprocess.run(command, timeout=60, capture_output=True, text=True)
    assert ended.returncode == {"breaks": 0, "exits": 3, "fails": 1}[way], ended.stderr
    assert held(watching) == 0, "at the end of the program, not after it"
    epoch = watching._job.info()["epochs"][0]
    assert epoch["acked"] == 3 * 4 if way != "fails" else epoch["acked"] < SAMPLES


@pytest.mark.parametrize("persistent", [False, True])
def test_torchs_own_loader_holds_nothing(patient: Server, persistent: bool) -> None:
    name = f"own-{persistent}"
    dataset, watching = epochs(patient, name), epochs(patient, name)
    loader: Any = torch.utils.data.DataLoader(
        dataset, batch_size=4, num_workers=2, persistent_workers=persistent
    )
    for _ in range(2):
        next(iter(loader))
        until("nobody holds a lease", lambda: held(watching) == 0, AT_ONCE)
    seen = {n for batch in loader for n in batch.tolist()}
    assert seen <= set(range(SAMPLES)) and dataset.stats()["visitation"] == "at-most-once"
    assert watching._job.info()["epochs"][0]["redelivered"] == 0 and entries(patient, "expired") == 0


def test_a_server_that_is_gone_delays_no_break() -> None:
    with serving("--limits-lease-ttl", "4s") as server:
        make_tree(server)
        dataset = epochs(server, "gone")
        batches: Any = iter(DataLoader(dataset, num_workers=2))
        got = next(batches).tolist()
        dataset.state_dict()
        server.kill()
        begun = time.monotonic()
        batches.close()
        assert time.monotonic() - begun < 4, "the releases wait for no server"
        server.start(server.url.removeprefix("http://"))
        got += [n for batch in DataLoader(dataset, num_workers=2) for n in batch.tolist()]
        assert sorted(got) == list(range(SAMPLES)) and dataset.stats()["receipt"] == "agrees"


class ToldJob:
    """Records what a tracker tells its job."""

    def __init__(self) -> None:
        self.dropped: list[int] = []
        self.released: list[int] = []

    def hold(self, token: tuple[int, ...], grant: bytes = b"") -> bool:
        assert token[2] not in self.dropped
        return True

    def drop_lease(self, token: tuple[int, ...]) -> None:
        self.dropped.append(token[2])

    def release(self, epoch: int, rank: int, leases: list[int]) -> None:
        assert (epoch, rank) == (5, 1)
        self.released += leases

    def settle(self, within: float) -> bool:
        return within < 1


def test_what_the_loop_consumed_is_not_released() -> None:
    job: Any = ToldJob()
    tracker = AckTracker(job, "told", 5, "00" * 32)
    for lease in (11, 12):
        tracker.hand_out(Batch((5, 1, lease, 8, 30_000)), 0, is_stepped=False)
        if lease == 11:
            tracker.mark_consumed()
    # 11 is consumed and not acknowledged, 12 is in hand, and 0 is an empty slot.
    tracker.release_lost(1, [0, 11, 12, 13, 0, 14])
    assert (job.released, job.dropped) == ([13, 14], [])
    tracker.release_lost(1, [11, 12, 0])
    assert job.released == [13, 14], "no request for nothing"
    del tracker
    gc.collect()
    assert job.dropped == [12], "the batch in hand comes again, and the consumed one stays"
