"""`fletch.Epochs`: loops without PyTorch, which may not be importable."""

from __future__ import annotations

import collections
import json
import random
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Iterator

import pytest

import fletch
from conftest import BIN, Server, end_with_children, serving, until

HERE = Path(__file__).parent / "without_torch"
#: Enough for two ranks to be killed between two checkpoints, and no multiple of a step.
SAMPLES = 203


def publish_numbered(server: Server) -> None:
    """Publishes the dataset ``numbered``: 203 files, each of which begins with its name."""
    tree = server.scratch / "tree-numbered"
    tree.mkdir()
    rng = random.Random(11)
    for i in range(SAMPLES):
        (tree / f"{i:04}").write_bytes(f"{i:04}".encode() + rng.randbytes(rng.randrange(300)))
    server.publish("numbered", tree)


@pytest.fixture(scope="module")
def numbered() -> Iterator[Server]:
    """A server with the dataset ``numbered``."""
    with serving("--limits-lease-ttl", "5s") as server:
        publish_numbered(server)
        yield server


def epochs(server: Server, job: str, batch_size: int = 8, **more: Any) -> fletch.Epochs:
    client = fletch.Client(f"unix:{server.socket}", job=job)
    return fletch.Epochs(client, "numbered", job=job, batch_size=batch_size, **more)


def keys(batch: list[fletch.EpochSample]) -> list[str]:
    return [sample.key for sample in batch]


def test_nothing_imports_torch() -> None:
    package = Path(fletch.__file__).parent
    for file in (package / "epochs").rglob("*.py"):
        assert not re.search(r"^\s*(import|from) torch\b", file.read_text(), re.MULTILINE), file
    say = "import forbid, fletch, sys; print(fletch.Epochs.__module__, 'torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", say], cwd=HERE, capture_output=True, text=True, check=True)
    assert said.stdout == "fletch.epochs.epochs False\n"


class Ranks:
    """The processes of a training of two ranks."""

    def __init__(self, server: Server, folder: Path, job: str, run: str) -> None:
        self.folder = folder
        self.out = folder / f"{run}.out"
        with open(self.out, "wb") as out:
            self.processes = [
                subprocess.Popen(
                    [sys.executable, HERE / "rank.py", f"unix:{server.socket}", "numbered", job]
                    + [str(rank), "2", str(folder), run],
                    stdout=out,
                    stderr=out,
                )
                for rank in range(2)
            ]

    def kill(self) -> None:
        assert all(process.poll() is None for process in self.processes), self.out.read_text()
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.wait(20)

    def end(self) -> None:
        for process in self.processes:
            end_with_children(process)


def test_two_ranks_that_are_killed_resume_exactly_once(numbered: Server, tmp_path: Path) -> None:
    for run, step in (("first", 6), ("second", 3), ("last", None)):
        ranks = Ranks(numbered, tmp_path, "killed", run)
        try:
            if step is not None:
                mark = tmp_path / f"{run}-saved-{step}-0"
                until("a checkpoint", lambda: mark.exists() or ranks.processes[1].poll() is not None)
                # Some steps after the checkpoint, which the states do not have.
                log = tmp_path / "rank-1.log"
                size = log.stat().st_size
                until("steps after it", lambda: log.stat().st_size > size)
                ranks.kill()
            else:
                assert [p.wait(120) for p in ranks.processes] == [0, 0], ranks.out.read_text()
        finally:
            ranks.end()
    results = [json.loads((tmp_path / f"rank-{rank}.result").read_text()) for rank in range(2)]
    seen = collections.Counter(key for result in results for key in result["seen"])
    # Of several ranks the tail is dropped: 25 steps of 8.
    assert len(seen) == sum(seen.values()) == 200
    for result in results:
        assert (result["agrees"], result["receipt"], result["frameworks"]) == (True, "agrees", [])
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(2)]
    verify = [BIN / "fletch", "receipt", "verify", *logs, "--job", "killed", "--epoch", "0"]
    checked = subprocess.run([*verify, "--server", numbered.url], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_an_epoch_has_each_sample_once_in_lists(numbered: Server) -> None:
    with epochs(numbered, "lists") as data:
        assert (len(data), data.next_epoch, data.batch_size, data.rank, data.ranks) == (26, 0, 8, 0, 1)
        for number in range(2):
            batches = list(data.epoch(number))
            assert [len(batch) for batch in batches] == [8] * 25 + [3]
            got = collections.Counter(sample.key for batch in batches for sample in batch)
            assert len(got) == sum(got.values()) == SAMPLES
            stats = data.stats()
            assert (stats["epoch"], stats["samples"], stats["receipt"]) == (number, SAMPLES, "agrees")
            assert data.verify() and data.next_epoch == number + 1


def test_a_state_in_mid_epoch_continues_in_another_process_of_the_job(numbered: Server) -> None:
    first = epochs(numbered, "resumed")
    got: list[str] = []
    for step, batch in enumerate(first.epoch(), 1):
        got += keys(batch)
        if step == 7:
            state = first.state_dict()
        if step == 9:
            break
    assert first.next_epoch == 0 and len(got) == 72
    first.close()
    with pytest.raises(fletch.Invalid, match="were closed"):
        first.epoch()
    with epochs(numbered, "resumed", state=state) as second:
        assert second.next_epoch == 0
        # What came after the state is delivered again, the rest as well.
        rest = [key for batch in second.epoch() for key in keys(batch)]
        assert collections.Counter(got[:56] + rest) == collections.Counter(f"{i:04}" for i in range(SAMPLES))
        assert second.stats()["receipt"] == "agrees" and second.state_dict()["finished"]


def test_a_break_gives_the_batch_in_hand_back_and_the_rest_follows(numbered: Server) -> None:
    with epochs(numbered, "breaks") as data:
        got: list[str] = []
        while data.next_epoch == 0:
            for step, batch in enumerate(data.epoch(0), 1):
                if step == 5:
                    break
                got += keys(batch)
        assert collections.Counter(got) == collections.Counter(f"{i:04}" for i in range(SAMPLES))
        assert data.stats()["receipt"] == "agrees"
        with pytest.raises(fletch.Invalid) as refused:
            list(data.epoch(0))
        assert refused.value.code == "epoch_closed" and "give epoch() the number" in str(refused.value)


def test_the_next_batches_are_received_while_the_loop_uses_one(numbered: Server) -> None:
    with epochs(numbered, "ahead") as data, epochs(numbered, "ahead", rank=0, ranks=1) as watching:
        iteration = data.epoch()
        next(iteration)

        def held() -> int:
            return int(watching._own._job.info()["epochs"][0]["leases"])

        until("two leases ahead of the loop", lambda: held() == 3)
        del iteration
        until("only the batch in hand is held", lambda: held() == 1)


def test_a_second_iteration_ends_the_first(numbered: Server) -> None:
    with epochs(numbered, "twice") as data:
        first = data.epoch()
        next(first)
        second = data.epoch()
        with pytest.raises(RuntimeError, match="call epoch"):
            next(first)
        assert sum(len(batch) for batch in second) == SAMPLES


def test_a_loop_goes_on_after_its_server_was_gone(own_server: Server) -> None:
    publish_numbered(own_server)
    with epochs(own_server, "outage") as data:
        got: list[str] = []
        for step, batch in enumerate(data.epoch(), 1):
            got += keys(batch)
            if step == 4:
                own_server.kill()
                back = threading.Timer(3.0, own_server.start)
                back.start()
        back.join()
        assert collections.Counter(got) == collections.Counter(f"{i:04}" for i in range(SAMPLES))
        stats = data.stats()
        assert (stats["receipt"], stats["redelivered"]) == ("agrees", 0) and stats["stalled_seconds"] > 1


def test_a_tail_and_an_order_are_those_of_the_job(numbered: Server) -> None:
    with epochs(numbered, "padded", tail="pad", order="strict", seed=4) as data:
        batches = list(data.epoch())
        assert [len(batch) for batch in batches] == [8] * 26
        assert sum(sample.copy is None for batch in batches for sample in batch) == 5
    with epochs(numbered, "strict-again", tail="pad", order="strict", seed=4) as again:
        assert [keys(batch) for batch in again.epoch()] == [keys(batch) for batch in batches]
        assert again.stats()["samples"] == 208
    seeds = [sample.seed for batch in batches for sample in batch]
    assert len(set(seeds)) >= SAMPLES and all(0 < seed < 1 << 63 for seed in seeds)


def test_it_belongs_to_one_process_and_an_error_ends_it(numbered: Server) -> None:
    import pickle

    with pytest.raises(ZeroDivisionError):
        with epochs(numbered, "fails") as data:
            with pytest.raises(TypeError, match="one process"):
                pickle.dumps(data)
            for _ in data.epoch():
                raise ZeroDivisionError
    with epochs(numbered, "fails") as again:
        # The batch at which the step failed was not consumed.
        assert sum(len(batch) for batch in again.epoch()) == SAMPLES


def test_a_dataset_of_torch_goes_on_where_epochs_stopped(numbered: Server) -> None:
    torch = pytest.importorskip("torch")
    from fletch.torch import DataLoader, EpochDataset

    client = fletch.Client(f"unix:{numbered.socket}", job="both")
    with epochs(numbered, "both", order="strict") as data:
        iteration = data.epoch()
        got = [keys(next(iteration)) for _ in range(6)]
        seeds = {sample.key: sample.seed for sample in next(iteration)}
        got.append(list(seeds))
        state = data.state_dict()

    def name(sample: fletch.EpochSample) -> tuple[int, int]:
        return int(sample.key), sample.seed

    dataset = EpochDataset(
        client, "numbered", job="both", batch_size=8, order="strict", transform=name, state=state
    )
    rest = [batch for batch in DataLoader(dataset)]
    assert isinstance(rest[0][0], torch.Tensor)
    numbers = [int(key) for batch in got for key in batch] + torch.cat([b[0] for b in rest]).tolist()
    assert sorted(numbers) == list(range(SAMPLES)) and dataset.stats()["receipt"] == "agrees"
    # A seed depends on the sample, not on who reads it.
    again = EpochDataset(client, "numbered", job="other", batch_size=8, transform=name, seed=dataset._seed)
    of_torch = {f"{int(n):04}": int(s) for batch in DataLoader(again) for n, s in zip(*batch)}
    assert {key: of_torch[key] for key in seeds} == seeds
