"""Two processes that are the same rank of the same job: one reads on, the other is refused or takes over."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Iterator

import pytest

import fletch
from conftest import BIN, Server, serving, until
from fletch.torch import DataLoader
from fletch.epochs.receipt_difference import reasons
from test_epochs import SAMPLES, epochs, make_tree, seen

TTL = 4.0

#: A training script: prints each batch after its step. Its arguments are the socket, the job, the seconds of
#: a step, the number of workers, how they start, and words. Steps take no time once the file `go` is there.
SCRIPT = """
import os, sys, time
import fletch
from fletch.torch import DataLoader, EpochDataset

def number(sample):
    return int.from_bytes(sample.content[:4], "little")

def main():
    socket, job, pause, workers, method, *words = sys.argv[1:]
    client = fletch.Client(f"unix:{socket}", job=job, timeout=20)
    data = EpochDataset(
        client, "numbered", job=job, batch_size=8, transform=number, take_over="take-over" in words
    )
    more = {"num_workers": int(workers)}
    if int(workers):
        more["multiprocessing_context"] = method
    steps = 0
    for batch in DataLoader(data, **more):
        end = time.monotonic() + float(pause)
        while time.monotonic() < end and not os.path.exists("go"):
            time.sleep(0.02)
        print("batch", *batch.tolist(), flush=True)
        steps += 1
        if "fail" in words and steps == 3:
            raise ValueError("the model diverged")
        if "stop" in words and steps == 3:
            break
    print("end", data.stats()["receipt"], data.stats()["differs_because"], flush=True)

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def short_server() -> Iterator[Server]:
    with serving("--limits-lease-ttl", f"{TTL:.0f}s") as server:
        make_tree(server)
        yield server


@pytest.fixture(scope="module")
def patient_server() -> Iterator[Server]:
    """A server whose leases live longer than every test."""
    with serving("--limits-lease-ttl", "300s") as server:
        make_tree(server)
        yield server


class Run:
    """A run of the script. The fixture `no_run_is_left` ends it."""

    started: list[Run] = []

    def __init__(
        self, server: Server, tmp: Path, job: str, *words: str, pause: float = 0.0, workers: str = "0-fork"
    ) -> None:
        script = tmp / "train.py"
        script.write_text(SCRIPT)
        self.out = tmp / f"out-{time.monotonic_ns()}"
        number, method = workers.split("-")
        with open(self.out, "wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", script, server.socket, job, str(pause), number, method]
                + [*words],
                stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd=tmp,
            )

        Run.started.append(self)

    def text(self) -> str:
        return self.out.read_text()

    def numbers(self) -> list[int]:
        batches = [line.split()[1:] for line in self.text().splitlines() if line.startswith("batch ")]
        return [int(n) for batch in batches for n in batch]

    def until_batch(self) -> None:
        # Workers that are spawned import torch, each by itself.
        until("a batch", lambda: "batch" in self.text() or self.process.poll() is not None, 180)
        assert "batch" in self.text(), self.text()

    def ended(self, code: int = 0) -> str:
        assert self.process.wait(180) == code, self.text()
        return self.text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)


@pytest.fixture(autouse=True)
def no_run_is_left() -> Iterator[None]:
    yield
    while Run.started:
        Run.started.pop().kill()


def processes_in(folder: Path) -> list[int]:
    """The processes whose working directory is this folder."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            if os.readlink(f"/proc/{pid}/cwd") == str(folder):
                found.append(pid)
        except OSError:
            # It has ended.
            continue
    return found


def show(server: Server, job: str) -> str:
    command = [BIN / "fletch", "jobs", "show", job, "--server", server.url]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def show_if(server: Server, job: str) -> str:
    """What the server shows of a job; nothing before the job is declared."""
    command = [BIN / "fletch", "jobs", "show", job, "--server", server.url]
    return subprocess.run(command, capture_output=True, text=True).stdout


@pytest.mark.parametrize("workers", ["0-fork", "2-fork", "2-spawn", "2-forkserver"])
def test_a_copy_of_a_script_is_refused(short_server: Server, tmp_path: Path, workers: str) -> None:
    job = f"copied-{workers}"
    first = Run(short_server, tmp_path, job, pause=60, workers=workers)
    until("the first one asked", lambda: f"process {first.process.pid} on " in show_if(short_server, job))
    second = Run(short_server, tmp_path, job)
    said = second.ended(1)
    (tmp_path / "go").touch()
    assert f"process {first.process.pid} on " in said and "rank_in_use" in said, said
    assert "end that process" in said and "take_over=True" in said and not second.numbers()
    # Every sample once, and workers that share an id do not keep each other out.
    assert "end agrees []" in first.ended()
    assert sorted(first.numbers()) == list(range(SAMPLES))


@pytest.mark.parametrize("workers", ["0-fork", "2-fork", "2-spawn", "2-forkserver"])
def test_a_script_that_was_killed_is_started_again(
    short_server: Server, tmp_path: Path, workers: str
) -> None:
    job = f"killed-{workers}"
    first = Run(short_server, tmp_path, job, pause=0.5, workers=workers)
    first.until_batch()
    # The first batch is acknowledged before the second step ends.
    until("a second batch", lambda: len(first.numbers()) > 8)
    first.kill()
    second = Run(short_server, tmp_path, job, workers=workers)
    said = second.ended()
    got = first.numbers() + second.numbers()
    # The batch in hand was not acknowledged, so it came again.
    assert sorted(set(got)) == list(range(SAMPLES)) and len(got) <= SAMPLES + 8
    assert "end differs" in said and f"process {first.process.pid} on " in said, said
    # Also a worker that began after its parent was killed.
    until("no worker is left", lambda: processes_in(tmp_path) == [])


@pytest.mark.parametrize("word, code", [("stop", 0), ("fail", 1)])
@pytest.mark.parametrize("workers", ["0-fork", "2-fork"])
def test_a_script_that_ended_lets_the_next_one_begin(
    patient_server: Server, tmp_path: Path, word: str, code: int, workers: str
) -> None:
    job = f"ended-{word}-{workers}"
    first = Run(patient_server, tmp_path, job, word, workers=workers)
    first.ended(code)
    assert "ended" in show(patient_server, job)
    second = Run(patient_server, tmp_path, job, workers=workers)
    second.ended()
    got = first.numbers() + second.numbers()
    assert sorted(set(got)) == list(range(SAMPLES)) and len(got) <= SAMPLES + 8


def test_a_flag_takes_the_rank_over(patient_server: Server, tmp_path: Path) -> None:
    first = Run(patient_server, tmp_path, "taken", pause=2, workers="2-fork")
    first.until_batch()
    second = Run(patient_server, tmp_path, "taken", "take-over", workers="2-fork")
    second.until_batch()
    (tmp_path / "go").touch()
    second.ended()
    said = first.ended(1)
    assert "rank_taken" in said and f"process {second.process.pid} on " in said, said
    got = first.numbers() + second.numbers()
    assert sorted(set(got)) == list(range(SAMPLES))


def test_a_process_that_hangs_is_replaced_and_then_told(short_server: Server, tmp_path: Path) -> None:
    first = Run(short_server, tmp_path, "hangs", pause=1)
    first.until_batch()
    first.process.send_signal(signal.SIGSTOP)
    second = Run(short_server, tmp_path, "hangs")
    second.ended()
    first.process.send_signal(signal.SIGCONT)
    said = first.ended(1)
    assert "rank_taken" in said and f"process {second.process.pid} on " in said, said
    assert sorted(set(first.numbers() + second.numbers())) == list(range(SAMPLES))


def test_two_jobs_of_a_sweep_do_not_meet(short_server: Server, tmp_path: Path) -> None:
    runs = [Run(short_server, tmp_path, f"sweep-{n}", pause=0.02) for n in range(2)]
    for run in runs:
        assert "end agrees []" in run.ended()
        assert sorted(run.numbers()) == list(range(SAMPLES))


def test_a_server_that_restarts_lets_its_reader_go_on(tmp_path: Path) -> None:
    with serving("--limits-lease-ttl", f"{TTL:.0f}s") as server:
        make_tree(server)
        first = Run(server, tmp_path, "over-a-restart", pause=3, workers="1-fork")
        first.until_batch()
        server.kill()
        server.start()
        until("it is back", lambda: f"process {first.process.pid} on " in show(server, "over-a-restart"))
        second = Run(server, tmp_path, "over-a-restart")
        assert "rank_in_use" in second.ended(1)
        (tmp_path / "go").touch()
        first.ended()
        assert sorted(first.numbers()) == list(range(SAMPLES))


def test_copies_have_the_id_and_a_new_dataset_another(patient_server: Server) -> None:
    first = epochs(patient_server, "ids")
    assert pickle.loads(pickle.dumps(first))._loader.id == first._loader.id
    batches = iter(DataLoader(first))
    next(batches)
    second = epochs(patient_server, "ids")
    assert second._loader.id != first._loader.id
    # The same process: the dataset that is iterated last goes on, without a wait.
    assert sorted(seen(iter(DataLoader(second)))) == list(range(SAMPLES))
    with pytest.raises(fletch.Invalid) as caught:
        next(batches)
    assert caught.value.code == "rank_taken" and f"process {os.getpid()} on " in str(caught.value)


def test_a_dataset_that_is_freed_gives_its_rank_up(patient_server: Server) -> None:
    dataset: Any = epochs(patient_server, "freed")
    batches: Any = iter(DataLoader(dataset))
    next(batches)
    assert "ended" not in show(patient_server, "freed")
    del batches, dataset
    until("the rank is free", lambda: "ended" in show(patient_server, "freed"))


def test_a_differing_receipt_says_why() -> None:
    def receipt(delivered: int, *rows: dict[str, Any]) -> dict[str, Any]:
        return {"receipt": {"delivered": delivered}, "acked_by": list(rows)}

    def row(loader: str | None, entries: int, rank: int = 0) -> dict[str, Any]:
        named = {"id": loader, "host": "gpu-1", "pid": 7, "since_ms": 0}
        return {"rank": rank, "entries": entries, **({} if loader is None else {"loader": named})}

    def told(of: dict[str, Any], consumed: int, rank: int | None = 0, restored: bool = False) -> str:
        return "; ".join(reasons(of, loader="me", rank=rank, consumed=consumed, restored=restored))

    text = told(receipt(10, row("me", 6), row("it", 4)), 6)
    assert "this process acknowledged 6 samples of rank 0" in text
    assert "process 7 on gpu-1 (since 1970-01-01T00:00:00Z) acknowledged 4 samples of rank 0" in text
    assert "clients that do not name themselves acknowledged 4" in told(receipt(10, row(None, 4)), 6)
    assert "4 samples were acknowledged before the server" in told(receipt(10, row("me", 6)), 6)
    assert "loaded a state" in told(receipt(10, row("me", 10)), 4, restored=True)
    assert "4 samples were compared with a receipt of 10" in told(receipt(10, row("me", 10)), 4)
    assert "replaced by others or altered" in told(receipt(10, row("me", 10)), 10)
    # Ranks that were compared together: a rank with two loaders stands out.
    rows = (row("me", 5), row("other-rank", 3, 1), row("it", 2, 1))
    text = told(receipt(10, *rows), 10, rank=None)
    assert "this process" not in text and "acknowledged 2 samples of rank 1" in text
