"""The map-style datasets and the loader, against torchvision on the same tree."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest
import torch
import torchvision
from torch.utils.data import Subset
from torchvision.transforms import functional

import fletch
import fletch.torch

from conftest import Server, until


def size(view: memoryview) -> int:
    return len(view)


def begun(dataset: Any) -> list[fletch.PendingRead]:
    """The pending reads of a dataset."""
    if dataset._pending is None:
        return []
    return [r for reads in dataset._pending.pending.values() for r in reads]


@contextmanager
def fork_of(holds: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
    """Forks a process, and checks a condition in it."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if holds() else 1)
        finally:
            os._exit(2)
    yield lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_map_items_are_the_samples(client: fletch.Client, files: Path) -> None:
    dataset = fletch.torch.MapDataset(client.resolve("files"))
    assert len(dataset) == 604
    for i in (0, 17, -1):
        assert dataset[i] == (files / dataset.samples[i].key).read_bytes()
    views = dataset[[3, 1, 3]]
    assert views == [dataset[3], dataset[1], dataset[3]] and dataset.__getitems__([3, 1, 3]) == views
    for bad in (604, -605):
        with pytest.raises(IndexError):
            dataset[bad]
    assert len(list(Subset(dataset, [1, 2]))) == 2
    one = fletch.torch.MapDataset(dataset.version, size, dataset.samples[5:6])
    assert list(one) == [len(dataset[5])] and len(one) == 1


def test_map_items_of_several_entries_are_dicts(client: fletch.Client, shards: Path) -> None:
    version = client.resolve("shards")
    dataset = fletch.torch.MapDataset(version)
    assert len(dataset) == 8
    assert all(len(sample["jpg"]) == 9000 for sample in dataset)
    item = dataset[6]
    assert item.keys() == {"__key__", "cls", "jpg"}
    assert bytes(item["cls"]) == b"2" and len(item["jpg"]) == 9000 and item["__key__"] == "1-2"


def test_a_batch_is_one_request(client: fletch.Client, files: Path) -> None:
    dataset = fletch.torch.MapDataset(client.resolve("files"), size)
    small = [i for i, s in enumerate(dataset.samples) if "/" in s.key]
    dataset[0]
    before = client.stats()["requests"]
    loader = fletch.torch.DataLoader(Subset(dataset, small), batch_size=64, shuffle=True)
    assert len(loader) == 10
    sizes = torch.cat(list(loader))
    # Over the unix socket each batch is one ask, and a request for what is not at hand.
    sent = client.stats()["requests"] - before
    assert sent == 10 or (client.server.startswith("unix:") and 10 < sent <= 20)
    assert sorted(sizes.tolist()) == sorted(len(v) for v in dataset.version.read_many(
        [dataset.samples[i].ordinals[0] for i in small]))


def test_the_loader_takes_what_torch_takes(client: fletch.Client, files: Path) -> None:
    dataset = fletch.torch.MapDataset(client.resolve("files"), size)
    loader = fletch.torch.DataLoader
    order = list(range(40, 20, -1))
    assert torch.cat(list(loader(dataset, 8, sampler=order))).tolist() == [dataset[i] for i in order]
    assert len(list(loader(dataset, 100, drop_last=True))) == 6
    assert [b.tolist() for b in loader(dataset, batch_sampler=[[1, 2], [3]])] == [
        [dataset[1], dataset[2]],
        [dataset[3]],
    ]
    assert next(iter(loader(dataset, batch_size=None))) == dataset[0]
    assert next(iter(loader(dataset, 4, collate_fn=tuple))) == tuple(dataset[i] for i in range(4))
    seeded = [
        torch.cat(list(loader(dataset, 64, True, generator=torch.Generator().manual_seed(3)))).tolist()
        for _ in range(2)
    ]
    assert seeded[0] == seeded[1] != [dataset[i] for i in range(604)]
    plain = loader(torch.arange(10), batch_size=5)
    assert plain.batch_size == 5 and len(list(plain)) == 2
    for bad in ({"sampler": order, "shuffle": True}, {"batch_sampler": [[1]], "shuffle": True}):
        with pytest.raises(ValueError):
            loader(dataset, **bad)


@pytest.mark.parametrize("ahead", [None, 0, 1, 5])
def test_without_workers_batches_are_read_ahead(server: Any, files: Path, ahead: int | None) -> None:
    client = fletch.Client(f"unix:{server.socket}")
    dataset = fletch.torch.MapDataset(client.resolve("files"), bytes)
    few = [i for i, s in enumerate(dataset.samples) if "/" in s.key][:80]
    subset = Subset(Subset(dataset, few), range(1, 80))
    loader = fletch.torch.DataLoader(subset, 8, collate_fn=list, prefetch_factor=ahead)
    assert len(loader) == 10
    assert (loader.batch_size, loader.batch_sampler.batch_size) == (8, 8)
    expected = [dataset[i] for i in few[1:]]
    assert [item for batch in loader for item in batch] == expected

    def asked() -> int:
        return client.stats()["requests"] - before

    before = client.stats()["requests"]
    batches = iter(loader)
    assert next(batches) == expected[:8]
    most = 2 if ahead is None else ahead
    until("they are read ahead", lambda: asked() == 1 + most)
    # Somebody else's batches meanwhile, and a process of its own.
    assert dataset[few[3]] == expected[2]
    with fork_of(lambda: next(batches) == expected[8:16] and dataset[few[3]] == expected[2]) as well:
        assert well()
    assert pickle.loads(pickle.dumps(dataset))[few[5]] == expected[4]
    assert [item for batch in batches for item in batch] == expected[8:]
    batches = iter(loader)
    next(batches)
    assert len(begun(dataset)) == most
    del batches
    assert not begun(dataset), "what a loop was left with is given up"
    # The same batch again and again, and two loops at once.
    batches = [few[1:3]] * 9
    again = fletch.torch.DataLoader(
        dataset, batch_sampler=batches, collate_fn=list, prefetch_factor=ahead
    )
    assert list(zip(again, again)) == [(expected[:2], expected[:2])] * 9 and not begun(dataset)


def test_what_was_read_ahead_outlives_its_server(own_server: Any, tmp_path: Path) -> None:
    for i in range(40):
        (tmp_path / f"{i:02}").write_bytes(bytes([i]) * 5000)
    own_server.publish("x", tmp_path)
    client = fletch.Client(f"unix:{own_server.socket}", timeout=1)
    dataset = fletch.torch.MapDataset(client.resolve("x"), lambda view: view[0])
    batches = iter(fletch.torch.DataLoader(dataset, 10, collate_fn=list))
    before = client.stats()["requests"]
    assert next(batches) == list(range(10))
    readings = begun(dataset)
    assert len(readings) == 2
    until("two batches are here", lambda: all(r.done() for r in readings))
    # Each batch is one ask, and a request for what is not at hand.
    assert 3 <= client.stats()["requests"] - before <= 6
    ahead = [client.resolve("x").prefetch([1, 2]), client.resolve("x").prefetch(["absent"])]
    assert [bytes(view[:1]) for view in ahead[0].views()] == [b"\1", b"\2"]
    assert len(ahead[0].views()) == 2, "asked for once more it is read once more"
    for _ in range(2):
        with pytest.raises(fletch.NotFound, match="absent"):
            ahead[1].views()
    own_server.kill()
    assert next(batches) == list(range(10, 20)) and next(batches) == list(range(20, 30))
    with pytest.raises(fletch.Unavailable):
        next(batches)


def test_many_bytes_wait_for_what_was_begun_before(client: fletch.Client, files: Path) -> None:
    version = client.resolve("files")
    first = version.prefetch(["large.bin"])
    second = version.prefetch(["large.bin", "middle.bin"], after=first)
    until("both are here", second.done)
    assert first.done()
    assert [len(view) for view in first.views() + second.views()] == [35_000_001, 35_000_001, 3_000_000]
    # Nobody waits for one that is given up.
    first = version.prefetch(["large.bin"])
    second = version.prefetch(["large.bin"], after=first)
    del first
    assert len(second.views()[0]) == 35_000_001


def test_a_sampler_is_asked_when_torch_would(client: fletch.Client, files: Path) -> None:
    dataset = fletch.torch.MapDataset(client.resolve("files"), size)
    asked: list[int] = []

    def few(n: int) -> Iterator[int]:
        for i in range(n):
            asked.append(i)
            yield i
        raise LookupError("no more")

    for ahead, seen in ((None, 1), (2, 3)):
        asked.clear()
        batches = iter(fletch.torch.DataLoader(dataset, 1, sampler=few(3), prefetch_factor=ahead))
        assert next(batches).tolist() == [dataset[0]] and len(asked) == seen
        assert [next(batches).item(), next(batches).item()] == [dataset[1], dataset[2]]
        with pytest.raises(LookupError, match="no more"):
            next(batches)


def test_what_cannot_be_read_ahead_is_said_in_its_turn(client: fletch.Client, files: Path) -> None:
    dataset = fletch.torch.MapDataset(client.resolve("files"), size)
    loader = fletch.torch.DataLoader(dataset, batch_sampler=[[1], [10**6], [2]], prefetch_factor=2)
    batches = iter(loader)
    assert next(batches).tolist() == [dataset[1]]
    with pytest.raises(IndexError, match="1000000"):
        next(batches)
    assert next(batches).tolist() == [dataset[2]]
    with pytest.raises(ValueError, match="prefetch_factor"):
        fletch.torch.DataLoader(dataset, prefetch_factor=-1)

    class Twice(Subset[Any]):
        def __getitem__(self, index: Any) -> Any:
            return [super(Twice, self).__getitem__(i) for i in index for _ in range(2)]

        def __getitems__(self, indices: list[int]) -> Any:
            # Torch 2 demands it beside the other one.
            return self[indices]

    twice = fletch.torch.DataLoader(Twice(dataset, [7, 8, 9]), 2)
    assert twice._prefetched == 0, "a subclass may read other entries"
    assert [b.tolist() for b in twice] == [[dataset[7]] * 2 + [dataset[8]] * 2, [dataset[9]] * 2]


@pytest.mark.parametrize("valid", [None, lambda path: path.endswith((".png", "README"))])
def test_image_folder_is_torchvisions(client: fletch.Client, images: Path, valid: Any) -> None:
    theirs = torchvision.datasets.ImageFolder(str(images / "train"), is_valid_file=valid)
    ours = fletch.torch.ImageFolder(client.resolve("images"), "train", is_valid_file=valid)
    assert (ours.classes, ours.class_to_idx) == (theirs.classes, theirs.class_to_idx)
    assert ours.targets == theirs.targets and len(ours) == len(theirs) > 20
    assert [(str(images / path), target) for path, target in ours.samples] == theirs.samples
    assert ours.imgs is ours.samples
    assert any("again.png" in path for path, _ in ours.samples)
    for i, (path, _) in enumerate(ours.samples):
        if path.endswith("README"):
            continue
        (image, target), (their_image, their_target) = ours[i], theirs[i]
        assert (image.mode, image.tobytes(), target) == ("RGB", their_image.tobytes(), their_target), path


def test_image_folder_calls_what_it_is_given(client: fletch.Client, images: Path) -> None:
    names: list[str] = []

    def load(file: Any) -> bytes:
        names.append(file.name)
        return file.read()

    dataset = fletch.torch.ImageFolder(
        client.resolve("images"), "/train/", transform=len, target_transform=lambda t: -t, loader=load
    )
    path, target = dataset.samples[7]
    assert dataset[7] == ((images / path).stat().st_size, -target) and names == [path]
    loader = fletch.torch.DataLoader(dataset, batch_size=16)
    sizes, targets = next(iter(loader))
    assert sizes.shape == targets.shape == (16,)
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_image_folder_needs_classes_with_images(client: fletch.Client, images: Path) -> None:
    version = client.resolve("images")
    for root in ("train/cat/deep/er", "absent"):
        with pytest.raises(FileNotFoundError):
            fletch.torch.ImageFolder(version, root)
    with pytest.raises(FileNotFoundError, match="dog"):
        fletch.torch.ImageFolder(version, "train", is_valid_file=lambda p: "/dog/" not in p)


def test_image_folder_pickles_with_its_transform(client: fletch.Client, images: Path) -> None:
    dataset = fletch.torch.ImageFolder(client.resolve("images"), "train", functional.to_tensor)
    again = pickle.loads(pickle.dumps(dataset))
    assert again.samples == dataset.samples
    assert torch.equal(again[3][0], dataset[3][0]) and again[3][0].shape[0] == 3


def test_an_error_in_a_worker_keeps_its_class(own_server: Any, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    own_server.publish("x", tmp_path)
    version = fletch.Client(f"unix:{own_server.socket}", timeout=1).resolve("x")
    dataset = fletch.torch.MapDataset(version, size)
    own_server.kill()
    with pytest.raises(fletch.Unavailable, match="fletch-server"):
        list(fletch.torch.DataLoader(dataset, num_workers=1))


#: Changes every view of a dataset in place, again and again, as `torch.frombuffer` lets a script do.
IN_PLACE = """
import sys, warnings
import torch
import fletch

warnings.simplefilter("ignore")
version = fletch.Client(sys.argv[1], timeout=20).resolve(sys.argv[2])
ordinals = list(range(40))
expected = [bytes([i]) * 20_000 for i in ordinals]
for _ in range(30):
    views = version.read_many(ordinals)
    assert [bytes(view) for view in views] == expected
    again = version.read_many(ordinals)
    for view in views:
        torch.frombuffer(view, dtype=torch.uint8)[100:9000].add_(7)
    assert all(bytes(view[100:9000]) == bytes([i + 7]) * 8900 for i, view in enumerate(views))
    # Neither views that are there nor those of later reads see it.
    assert [bytes(view) for view in again] == expected
"""


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_an_operation_in_place_on_a_view_harms_nobody(server: Server, transport: str) -> None:
    tree = server.scratch / f"tree-in-place-{transport}"
    tree.mkdir()
    for i in range(40):
        (tree / f"{i:02}").write_bytes(bytes([i]) * 20_000)
    server.publish(f"in-place-{transport}", tree)
    url = f"unix:{server.socket}" if transport == "unix" else server.url
    subprocess.run([sys.executable, "-c", IN_PLACE, url, f"in-place-{transport}"], check=True)
