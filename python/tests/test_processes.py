"""Workers of every start method, and the files that they leave."""

from __future__ import annotations

import collections
import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing

import fletch
import fletch.torch
from conftest import BIN, Server, in_child, serving, sockets_of, until
from fletch.torch import loader
from test_epochs import SAMPLES, epochs, make_tree, seen

METHODS = ("fork", "forkserver", "spawn")

# The server that forks has the package loaded, as programs do that want quick workers.
multiprocessing.set_forkserver_preload(["fletch.torch"])


def cases() -> list[tuple[str, bool, int]]:
    """Method, used before in the parent, workers. Starting eight interpreters takes long: the long run has
    all of the combinations, the short one leaves two out."""
    every = [c for c in itertools.product(METHODS, (False, True), (0, 2, 8)) if c[0] == "fork" or c[2]]
    soak = os.environ.get("SOAK") == "1"
    return [c for c in every if soak or c[0] == "fork" or c[2] < 8 or c[1]]


class Seen:
    """A transform that returns its process, and the process's sockets to the server."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, view: memoryview) -> tuple[int, int, str]:
        return len(view), os.getpid(), " ".join(sorted(to_server(self.path)))


def to_server(path: str) -> set[str]:
    """This process's sockets whose other end is the server's unix socket."""
    import socket

    out = set()
    for inode in sockets_of():
        for fd in os.listdir("/proc/self/fd"):
            try:
                if os.readlink(f"/proc/self/fd/{fd}") != inode:
                    continue
                with socket.socket(fileno=os.dup(int(fd))) as s:
                    if s.family == socket.AF_UNIX and s.getpeername() == path:
                        out.add(inode)
            except OSError:
                continue
    return out


def left() -> set[str]:
    """What processes of this program leave in shared memory and in the temporary directory, if they do. The
    directory that Python itself keeps until this process ends is not counted. Other tests have a `/dev/shm`
    of their own."""
    own = multiprocessing.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    shm = {f"/dev/shm/{n}" for n in os.listdir("/dev/shm")}
    names = (n for n in os.listdir(tempfile.gettempdir()) if n.startswith(("pymp-", "torch_")))
    return shm | {os.path.join(tempfile.gettempdir(), n) for n in names} - {own}


def plain(items: list[Any]) -> list[Any]:
    return items


@pytest.mark.parametrize(("method", "used", "workers"), cases())
def test_the_matrix(server: Server, files: Path, method: str, used: bool, workers: int) -> None:
    before = left()
    client = fletch.Client(f"unix:{server.socket}", job="matrix", timeout=60)
    path = str(server.socket)
    dataset = fletch.torch.MapDataset(client.resolve("files"), Seen(path))
    if used:
        dataset[0]
        assert to_server(path)
    loader = fletch.torch.DataLoader(
        dataset,
        batch_size=32,
        num_workers=workers,
        collate_fn=plain,
        multiprocessing_context=method if workers else None,
        timeout=120 if workers else 0,
    )
    items = [item for batch in loader for item in batch]
    del loader
    sizes = [n for n, _, _ in items]
    assert sizes == [version_size(dataset, i) for i in range(len(dataset))]
    sockets: dict[int, set[str]] = {}
    for _, pid, inodes in items:
        sockets.setdefault(pid, set()).update(inodes.split())
    assert len(sockets) == max(workers, 1) and all(sockets.values())
    for a, b in itertools.combinations(sockets.values(), 2):
        assert not a & b, "two processes share a connection"
    if workers:
        assert os.getpid() not in sockets
        assert not to_server(path) & set().union(*sockets.values())
    # And this process goes on.
    assert dataset[1][0] == sizes[1]
    del dataset, items
    until("nothing is left", lambda: left() <= before)


class Numbered:
    """A transform that returns the sample's number, its process, and the process's sockets to the server."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, sample: fletch.torch.EpochSample) -> tuple[int, int, str]:
        return sample.number, os.getpid(), " ".join(sorted(to_server(self.path)))


@pytest.mark.parametrize(("method", "workers"), sorted({(m, w) for m, _, w in cases()}))
def test_the_matrix_of_epochs(server: Server, files: Path, method: str, workers: int) -> None:
    # A dataset of epochs declares its job: this process used the client before, always.
    before = left()
    client = fletch.Client(f"unix:{server.socket}", job="matrix", timeout=60)
    path = str(server.socket)
    samples = len(client.resolve("files").samples())
    dataset = fletch.torch.EpochDataset(
        client, "files", job=f"matrix-{method}-{workers}", batch_size=4, transform=Numbered(path)
    )
    loader = fletch.torch.DataLoader(
        dataset,
        num_workers=workers,
        collate_fn=plain,
        multiprocessing_context=method if workers else None,
        timeout=120 if workers else 0,
    )
    for epoch in range(2):
        items = [item for batch in loader for item in batch]
        assert sorted(n for n, _, _ in items) == list(range(samples))
        sockets: dict[int, set[str]] = {}
        for _, pid, inodes in items:
            sockets.setdefault(pid, set()).update(inodes.split())
        # A worker that comes late may find nothing left.
        assert sockets and len(sockets) <= max(workers, 1) and all(sockets.values())
        assert (os.getpid() in sockets) == (workers == 0)
        here = {os.getpid(): to_server(path)} if workers else {}
        for a, b in itertools.combinations([*sockets.values(), *here.values()], 2):
            assert not a & b, "two processes share a connection"
        stats = dataset.stats()
        assert (stats["epoch"], stats["samples"], stats["receipt"]) == (epoch, samples, "agrees")
        assert stats["visitation"] == "exactly-once"
    del loader, dataset, items
    until("nothing is left", lambda: left() <= before)


def io_threads() -> list[str]:
    """The threads of this process that drive connections, by number."""
    out = []
    for thread in Path("/proc/self/task").iterdir():
        # It may end between the one line and the other.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if (thread / "comm").read_text().startswith("fletch-io"):
                out.append(thread.name)
    return out


@pytest.mark.parametrize("forks", ["once", "again and again"])
def test_what_is_held_is_renewed_after_a_fork(forks: str) -> None:
    ttl = 6.0
    with serving("--limits-lease-ttl", f"{ttl:.0f}s") as server:
        make_tree(server)
        watching, dataset = (epochs(server, "forked") for _ in range(2))
        batches = iter(fletch.torch.DataLoader(dataset))
        got = next(batches).tolist()
        in_child(lambda: io_threads() == [])
        end = time.monotonic() + 2 * ttl
        while time.monotonic() < end:
            # Asking through the other one begins nothing of this one.
            now = watching._job.info()["epochs"][0]
            assert (now["held"], now["leases"], now["redelivered"]) == (len(got), 1, 0)
            time.sleep(ttl / 20)
            if forks != "once":
                in_child(lambda: io_threads() == [])
        got += seen(batches)
        assert sorted(got) == list(range(SAMPLES))
        assert (dataset.stats()["receipt"], dataset.stats()["redelivered"]) == ("agrees", 0)
        # Where nothing is held a fork begins nothing.
        in_child(lambda: io_threads() == [])
        until("none of them is left", lambda: io_threads() == [])


def test_what_a_process_holds_its_child_does_not_renew(own_server: Server) -> None:
    make_tree(own_server)
    watching, dataset = (epochs(own_server, "left-behind") for _ in range(2))
    next(iter(fletch.torch.DataLoader(dataset)))
    ready, lives = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        dataset._job.info()
        os.write(ready[1], b".")
        os.read(lives[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        dataset._acks.drop()
        until("the lease expires", lambda: watching._job.info()["epochs"][0]["leases"] == 0)
    finally:
        os.write(lives[1], b".")
        os.waitpid(child, 0)
        for end in (*ready, *lives):
            os.close(end)


def version_size(dataset: fletch.torch.MapDataset, i: int) -> int:
    return dataset.version.entry(dataset.samples[i].ordinals[0]).size


TRAINING = """
import sys, torch, fletch, fletch.torch
def size(view): return len(view)
def length(sample): return len(sample.content)
if __name__ == "__main__":
    server, method, kind = sys.argv[1:]
    client = fletch.Client(server)
    if kind == "map":
        dataset = fletch.torch.MapDataset(client.resolve("files"), size)
        dataset[0]
        batch = 4
    else:
        job = "ctrl-c-" + method
        dataset = fletch.torch.EpochDataset(client, "files", job=job, batch_size=4, transform=length)
        batch = 1
    loader = fletch.torch.DataLoader(dataset, batch, num_workers=2, multiprocessing_context=method)
    while True:
        for batch in loader:
            print("step", flush=True)
"""


WRITING = """
import os, sys, time, fletch, fletch.torch
def number(sample): return sample.ordinal
if __name__ == "__main__":
    server, notes = sys.argv[1:]
    client = fletch.Client(server, timeout=20)
    data = fletch.torch.EpochDataset(client, "files", job="killed", batch_size=8, transform=number)
    for batch in fletch.torch.DataLoader(data, num_workers=2):
        time.sleep(0.06)
        data.append_consumption_log(notes)
        print(*batch.tolist(), flush=True)
    print("end", flush=True)
"""


def test_what_a_killed_process_wrote_down_agrees_with_the_receipt(own_server: Server, tmp_path: Path) -> None:
    """No state was saved, so the batch in hand at a kill comes again, and no other sample does."""
    tree = own_server.scratch / "tree-files"
    tree.mkdir()
    for i in range(600):
        (tree / f"{i:03}").write_bytes(random.Random(i).randbytes(i))
    own_server.publish("files", tree)
    script = tmp_path / "train.py"
    script.write_text(WRITING)
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    files, ended = [], False
    for run in range(4):
        files.append(tmp_path / f"{run}.notes")
        child = subprocess.Popen(
            [sys.executable, script, own_server.url, files[-1]],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert child.stdout is not None
        try:
            first = child.stdout.readline()
            assert first not in ("", "end\n"), f"run {run} has nothing left to do"
            if run < 3:
                time.sleep(chance.uniform(0, 0.5))
                child.kill()
            ended = child.stdout.read().endswith("end\n")
            assert ended == (run == 3) and (child.wait(60) == 0) == ended
            until("its workers end, too", lambda: group_of(child.pid) == [])
        finally:
            if group_of(child.pid):
                os.killpg(child.pid, signal.SIGKILL)
    verify = [BIN / "fletch", "receipt", "verify", *files, "--job", "killed", "--epoch", "0"]
    verify += ["--server", own_server.url]
    verified = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    # Ordinal and lease of each line that is whole.
    told = [[(line.split()[0], line.split()[3]) for line in f.read_text().split("\n")[1:-1]] for f in files]
    times = collections.Counter(ordinal for lines in told for ordinal, _ in lines)
    assert times.keys() == {str(i) for i in range(600)}
    # Of each run that was killed the last lease may not have been acknowledged.
    open_then = collections.Counter(o for lines in told[:3] for o, lease in lines if lease == lines[-1][1])
    again = {ordinal: n for ordinal, n in times.items() if n > 1 + open_then[ordinal]}
    assert again == {}, (own_server.scratch / "server.log").read_text()


def group_of(group: int) -> list[str]:
    """The processes of a group that have not ended, with their states."""
    out = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            out.append(f"{stat.parent.name} {fields[0]}")
    return out


@pytest.mark.parametrize("kind", ["map", "epochs"])
@pytest.mark.parametrize("method", METHODS)
def test_ctrl_c_leaves_nothing(server: Server, files: Path, tmp_path: Path, method: str, kind: str) -> None:
    before = left()
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    # A group of its own, so that all of it gets the signal, as from a terminal.
    child = subprocess.Popen(
        [sys.executable, script, server.url, method, kind],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "step\n"
        os.killpg(child.pid, signal.SIGINT)
        child.stdout.read()
        assert child.wait(60) != 0
        until("every process of the group ends", lambda: group_of(child.pid) == [])
    finally:
        if group_of(child.pid):
            os.killpg(child.pid, signal.SIGKILL)
    until("nothing is left", lambda: left() <= before)


def test_ctrl_c_inside_a_lock_is_no_hang(server: Server, files: Path) -> None:
    version = fletch.Client(server.url).resolve("files")
    batches = iter(fletch.torch.DataLoader(fletch.torch.MapDataset(version, len), 8, num_workers=2))
    next(batches)
    # As if the interrupt had come between the lock and the statement that gives it back.
    batches._index_queues[1]._notempty.acquire()
    loader._end()
    assert [w.exitcode for w in batches._workers] == [0, 0]


def test_a_worker_that_is_killed_is_an_error_and_not_a_hang(server: Server, files: Path) -> None:
    version = fletch.Client(server.url).resolve("files")
    dataset = fletch.torch.MapDataset(version, os_killer)
    with pytest.raises(RuntimeError, match="exited unexpectedly|killed by signal"):
        list(fletch.torch.DataLoader(dataset, 8, num_workers=2))
    assert len(version.read(0)) == version.entry(0).size


def os_killer(view: memoryview) -> int:
    if torch.utils.data.get_worker_info() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return len(view)
