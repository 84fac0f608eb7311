"""The buffers that a worker and the loop share: contents, lifetimes, bounds, forks and kills."""

from __future__ import annotations

import array
import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator

import pytest
import torch.utils.data

import fletch
import fletch.torch
from conftest import Server, until
from fletch.torch import shared_buffers
from test_processes import METHODS, group_of, left, plain

BATCH, LENGTH = 16, 40_000


def content(index: int, length: int = LENGTH) -> bytes:
    return random.Random(index).randbytes(length)


class Batches(torch.utils.data.Dataset[Any]):
    """Batches of views, without a server. The bytes of a sample tell its batch."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, batch: int) -> list[memoryview]:
        return [memoryview(content(batch * BATCH + i)) for i in range(BATCH)]


class KilledAt(Batches):
    """Batches whose worker is killed when it is asked for the last one."""

    def __getitem__(self, batch: int) -> list[memoryview]:
        if batch == self.batches - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(batch)


def loop_over(dataset: Batches, workers: int = 1, **settings: Any) -> Any:
    return iter(fletch.torch.DataLoader(dataset, None, num_workers=workers, collate_fn=plain, **settings))


def in_buffer(view: memoryview) -> bool:
    """Whether a view shows a buffer. A copy that came through the pipe belongs to `bytes`."""
    return not isinstance(view.obj, bytes)


def right(batch: int, views: list[memoryview]) -> bool:
    return views == [content(batch * BATCH + i) for i in range(BATCH)]


def shared_memories() -> list[str]:
    """What this process has of buffers: open files and mappings."""
    files = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            files.append(os.readlink(f"/proc/self/fd/{fd}"))
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in files + maps if "fletch-buffers" in line]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = left()
    gc.collect()
    assert shared_memories() == []
    yield
    gc.collect()
    until("no buffer is left", lambda: shared_memories() == [])
    until(f"no more is left than {before}", lambda: left() <= before)


class Shapes:
    """A transform that returns a content in every form that a batch can have."""

    def __call__(self, view: memoryview) -> Any:
        floats = memoryview(array.array("f", range(1200)))
        return {
            "view": view,
            "bytes": view.tobytes(),
            "pair": (view[::-1], [view[1:]]),
            "floats": floats.cast("B").cast("f", (30, 40)),
            "tensor": torch.arange(3),
            "length": len(view),
        }


@pytest.mark.parametrize("method", METHODS)
def test_contents_are_right_whatever_starts_the_worker(server: Server, files: Path, method: str) -> None:
    version = fletch.Client(f"unix:{server.socket}", timeout=60).resolve("files")
    dataset = fletch.torch.MapDataset(version, Shapes())
    paths = [version.entry(s.ordinals[0]).path for s in dataset.samples]
    loader = fletch.torch.DataLoader(
        dataset, 32, num_workers=2, collate_fn=plain, multiprocessing_context=method, timeout=120
    )
    at = shared = copied = 0
    before: list[Any] = []
    for batch in loader:
        # The loop may keep a batch while it gets the next one.
        for item, path in [*before, *zip(batch, paths[at:])]:
            body = (files / path).read_bytes()
            view = item["view"]
            assert type(view) is memoryview and view.readonly and view == body
            assert (view.format, view.shape) == ("B", (len(body),))
            assert type(item["bytes"]) is bytes and item["bytes"] == body and item["length"] == len(body)
            assert item["pair"] == (body[::-1], [body[1:]])
            floats = item["floats"]
            assert (floats.format, floats.shape, floats[29, 39]) == ("f", (30, 40), 1199.0)
            assert item["tensor"].tolist() == [0, 1, 2]
            shared, copied = shared + in_buffer(view), copied + (not in_buffer(view))
        before = list(zip(batch, paths[at:]))
        at += len(batch)
    assert at == len(paths)
    # The files of the dataset are both longer and shorter than what a buffer is for.
    assert shared > len(paths) / 2 and copied > 0
    assert any(len(v["view"]) > 30_000_000 for v, _ in before) or in_buffer(batch[0]["view"])


@pytest.mark.parametrize("workers", [1, 2])
def test_epochs_give_views_of_buffers(server: Server, files: Path, workers: int) -> None:
    client = fletch.Client(f"unix:{server.socket}", timeout=60)
    job = f"buffers-{workers}"
    data = fletch.torch.EpochDataset(client, "files", job=job, batch_size=8, transform=plain)
    got, shared = [], 0
    for samples in fletch.torch.DataLoader(data, num_workers=workers, collate_fn=plain):
        for sample in samples:
            assert type(sample) is fletch.torch.EpochSample and sample.content.readonly
            assert sample.content == (files / sample.path).read_bytes()
            got.append(sample.path)
            shared += in_buffer(sample.content)
        del samples, sample
    assert len(got) == len(set(got)) == len(data) and shared > len(got) / 2
    assert data.stats()["receipt"] == "agrees"


def test_shared_buffers_are_used_again_and_their_memory_is_bounded() -> None:
    batches = loop_over(Batches(60))
    memory = batches._fletch_buffers
    for number, views in enumerate(batches):
        assert right(number, views) and all(map(in_buffer, views)), number
        # The loop drops a batch when it asks for the next one.
        del views
        # Batches of 640 kB: at most 1 MiB of each buffer, and the page of states.
        assert os.fstat(memory._fd).st_blocks * 512 <= memory.buffers * shared_buffers._GROWTH_BYTES + 4096
    assert number == 59 and memory.buffers == 5


def test_views_that_are_kept_stay_right_and_later_batches_are_copies() -> None:
    batches = loop_over(Batches(20))
    memory = batches._fletch_buffers
    kept = list(batches)
    shared = [all(map(in_buffer, views)) for views in kept]
    assert shared == [True] * memory.buffers + [False] * (20 - memory.buffers)
    del batches, memory
    gc.collect()
    # The workers and the iteration are gone, and the views are not.
    assert all(right(number, views) for number, views in enumerate(kept))
    one = kept[0][3][7:9]
    del kept
    assert one == content(3)[7:9] and shared_memories() != []


def test_one_view_keeps_its_buffer_alone() -> None:
    batches = loop_over(Batches(40))
    memory = batches._fletch_buffers
    first = next(batches)[5]
    for number, views in enumerate(batches, 1):
        assert right(number, views) and all(map(in_buffer, views))
        del views
    assert first == content(5) and number == 39 and memory._lent >= {0}


def test_a_batch_longer_than_a_buffer_is_partly_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    # Half of a batch fits.
    monkeypatch.setattr(shared_buffers, "_WORKER_BYTES_MAX", 5 * BATCH * LENGTH // 2)
    for number, views in enumerate(loop_over(Batches(8))):
        assert right(number, views)
        assert 0 < sum(map(in_buffer, views)) < BATCH
        del views


def test_nobody_makes_a_memory_shorter() -> None:
    batches = loop_over(Batches(4))
    views = next(batches)
    # As another process of this user finds it.
    path = f"/proc/{os.getpid()}/fd/{batches._fletch_buffers._fd}"
    for length in [0, 4096, 1 << 40]:
        with pytest.raises(PermissionError):
            os.truncate(path, length)
    with pytest.raises(PermissionError):
        os.close(os.open(path, os.O_RDWR | os.O_TRUNC))
    assert right(0, views) and all(map(in_buffer, views))
    assert os.stat(path).st_nlink == 0, "it has no name"
    views = []
    assert all(right(number, views) for number, views in enumerate(batches, 1))


@pytest.mark.parametrize("fault", ["no memory for the loader", "no memory for a buffer"])
def test_without_memory_batches_are_copies(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    def fails(*_: Any) -> None:
        raise OSError(28, "no space")

    if fault == "no memory for the loader":
        monkeypatch.setattr(os, "memfd_create", fails)
    else:
        monkeypatch.setattr(os, "posix_fallocate", fails)
    for number, views in enumerate(loop_over(Batches(12))):
        assert right(number, views) and not any(map(in_buffer, views))
    assert number == 11


def test_a_forked_child_reads_what_its_parent_no_longer_has() -> None:
    batches = loop_over(Batches(40))
    memory = batches._fletch_buffers
    views = next(batches)
    go, told = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.read(go[0], 1)
        # A copy of the view that the child drops frees nothing.
        again = [view[:] for view in views]
        del views
        os.write(told[1], b"right" if right(0, again) else b"wrong")
        os.read(go[0], 1)
        os._exit(0)
    try:
        del views
        for number in range(1, 21):
            assert right(number, next(batches))
        assert memory._forks[0].buffers <= memory._lent
        os.write(go[1], b".")
        assert os.read(told[0], 5) == b"right"
    finally:
        os.write(go[1], b".")
        os.waitpid(child, 0)
        for end in (*go, *told):
            os.close(end)
    # The child has ended, so its buffer is free again.
    for number in range(21, 40):
        views = next(batches)
        assert right(number, views) and all(map(in_buffer, views))
    assert memory._forks == []


def test_persistent_workers_keep_their_buffers() -> None:
    loader = fletch.torch.DataLoader(
        Batches(12), None, num_workers=2, collate_fn=plain, persistent_workers=True
    )
    for epoch in range(3):
        for number, views in enumerate(loader):
            assert right(number, views) and all(map(in_buffer, views))
            del views
            if epoch == 1 and number == 4:
                # What the workers sent and the loop did not get gives its buffers back, too.
                break
    assert number == 11


def test_two_iterations_of_one_loader_share_no_buffer() -> None:
    loader = fletch.torch.DataLoader(Batches(10), None, num_workers=1, collate_fn=plain)
    assert loader.collate_fn is plain
    for number, (one, two) in enumerate(zip(iter(loader), iter(loader))):
        assert right(number, one) and right(number, two) and all(map(in_buffer, one + two))
        del one, two
    assert number == 9


def test_a_killed_worker_leaves_its_views() -> None:
    batches = loop_over(KilledAt(6))
    kept = [next(batches), next(batches)]
    with pytest.raises(RuntimeError, match="exited unexpectedly|killed by signal"):
        list(batches)
    assert all(right(number, views) and in_buffer(views[0]) for number, views in enumerate(kept))


LOOP = """
import sys
sys.path.insert(0, sys.argv[2])
import fletch.torch
from test_processes import plain
from test_shared_buffers import Batches
if __name__ == "__main__":
    batches = Batches(1 << 20)
    for views in fletch.torch.DataLoader(
        batches, None, num_workers=2, collate_fn=plain, multiprocessing_context=sys.argv[1]
    ):
        print("step", flush=True)
"""


@pytest.mark.parametrize(
    ("method", "number"), [*((m, signal.SIGINT) for m in METHODS), ("fork", signal.SIGKILL)]
)
def test_a_loop_that_is_ended_leaves_nothing(tmp_path: Path, method: str, number: signal.Signals) -> None:
    (tmp_path / "tmp").mkdir()
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    child = subprocess.Popen(
        [sys.executable, script, method, Path(__file__).parent],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        # Nobody removes the temporary directory of a Python that is killed.
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
    )
    try:
        assert child.stdout is not None
        assert [child.stdout.readline() for _ in range(8)] == ["step\n"] * 8
        if number == signal.SIGINT:
            os.killpg(child.pid, number)
        else:
            child.kill()
        child.stdout.read()
        assert child.wait(60) != 0
        until("every process of the group ends", lambda: group_of(child.pid) == [])
    finally:
        if group_of(child.pid):
            os.killpg(child.pid, signal.SIGKILL)
