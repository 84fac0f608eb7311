"""Epochs through the loader: every sample once, proved by the receipt, after breaks, losses and new ranks."""

from __future__ import annotations

import collections
import copy
import errno
import itertools
import json
import multiprocessing
import multiprocessing.reduction
import os
import pickle
import random
import signal
import subprocess
import tarfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any, Callable, Iterator, Literal

import pytest
import torch.distributed
import torch.multiprocessing
import torch.utils.data

import fletch
from fletch.torch import DataLoader, EpochDataset, EpochSample, MapDataset, Selection
from fletch.epochs import consumption_log, lease_stream
from fletch.torch import iteration
from conftest import BIN, Server

SAMPLES = 150


@pytest.fixture(scope="module")
def tree(server: Server) -> Path:
    return make_tree(server)


def make_tree(server: Server) -> Path:
    """The dataset `numbered`: sample i begins with its number."""
    tree = server.scratch / "tree-numbered"
    tree.mkdir()
    rng = random.Random(3)
    for i in range(SAMPLES):
        (tree / f"{i:04}").write_bytes(i.to_bytes(4, "little") + rng.randbytes(rng.randrange(3000)))
    server.publish("numbered", tree)
    return tree


def number(sample: EpochSample) -> int:
    """The number of a sample, read from its bytes."""
    n = int.from_bytes(sample.content[:4], "little")
    assert sample.path == f"{n:04}" and sample.number == n
    return n


def number_at_own_pace(sample: EpochSample) -> int:
    """The number of a sample. Workers differ in speed, so that their batches overtake each other."""
    worker = torch.utils.data.get_worker_info()
    time.sleep(0 if worker is None else worker.id * 0.003)
    return number(sample)


def epochs(server: Server, job: str, **settings: Any) -> EpochDataset:
    client = fletch.Client(f"unix:{server.socket}", job=job, timeout=20)
    settings = {"batch_size": 8, "transform": number, **settings}
    return EpochDataset(client, "numbered", job=job, **settings)


def seen(batches: Iterator[torch.Tensor]) -> list[int]:
    return torch.cat(list(batches)).tolist()


@pytest.fixture(scope="module")
def keyed(server: Server) -> None:
    """The dataset `keyed`: samples of two files, whose keys differ only in their directories.

    They are in a shard, in a shard of a folder, in a directory with the name of a shard, and in none. The
    glob makes samples of the files beside shards, too.
    """
    tree = server.scratch / "tree-keyed"
    body = server.scratch / "keyed-body"
    (tree / "deep").mkdir(parents=True)
    (tree / "loose.tar" / "cat").mkdir(parents=True)
    for shard in ("0.tar", "deep/1.tar"):
        with tarfile.open(tree / shard, "w") as tar:
            for name in ("cat/0001", "dog/0001", "top"):
                for extension in ("cls.txt", "jpg"):
                    body.write_text(f"{shard} {name} {extension}")
                    tar.add(body, arcname=f"{name}.{extension}")
    for name in ("loose.tar/cat/0001", "deep/0001", "0001"):
        for extension in ("cls.txt", "jpg"):
            (tree / f"{name}.{extension}").write_text(f"{name} {extension}")
    server.publish("keyed", tree, "--sample-rule", "stem", "--samples", "**")


def texts(content: dict[str, Any]) -> dict[str, str]:
    """A sample's content, as text: one character for each byte, at most forty."""
    members = {key: bytes(value[:40]).decode("latin-1") for key, value in content.items() if key != "__key__"}
    return {"__key__": content["__key__"], **members}


def texts_of(sample: EpochSample) -> tuple[int, dict[str, str]]:
    return sample.ordinal, texts(sample.content)


@pytest.mark.parametrize("workers", [0, 1])
def test_keys_of_an_epoch_are_those_of_the_version(server: Server, keyed: None, workers: int) -> None:
    client = fletch.Client(f"unix:{server.socket}", timeout=20)
    version = client.resolve("keyed")
    samples = version.samples()
    by_index = zip(samples, MapDataset(version, texts, samples))
    expected = {sample.ordinals[0]: content for sample, content in by_index}
    assert sorted(content["__key__"] for content in expected.values()) == sorted(
        ["cat/0001", "dog/0001", "top"] * 2 + ["loose.tar/cat/0001", "deep/0001", "0001"]
    )
    dataset = EpochDataset(client, "keyed", job=f"keyed-{workers}", batch_size=2, transform=texts_of)
    for _ in range(2):
        batches = DataLoader(dataset, num_workers=workers, collate_fn=list)
        assert dict(item for batch in batches for item in batch) == expected


def test_every_sample_of_shards_has_its_members_and_no_shard_travels(server: Server, shards: Path) -> None:
    client = fletch.Client(f"unix:{server.socket}", timeout=20)
    dataset = EpochDataset(client, "shards", job="members", batch_size=4, transform=texts_of)
    batches = list(DataLoader(dataset, num_workers=0, collate_fn=list))
    contents = [content for batch in batches for _, content in batch]
    assert [content.keys() for content in contents] == [{"__key__", "cls", "jpg"}] * 8
    assert dataset.stats()["bytes"] == 8 * 9001


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("order", ["substitute", "strict"])
def test_an_epoch_delivers_every_sample_once(server: Server, tree: Path, workers: int, order: str) -> None:
    dataset = epochs(server, f"whole-{order}-{workers}", order=order)
    loader = DataLoader(dataset, num_workers=workers)
    assert len(loader) == 19
    orders = []
    for epoch in range(2):
        orders.append(seen(iter(loader)))
        assert sorted(orders[-1]) == list(range(SAMPLES))
        stats = dataset.stats()
        assert (stats["epoch"], stats["samples"], stats["batches"]) == (epoch, SAMPLES, 19)
        assert (stats["visitation"], stats["receipt"], stats["redelivered"]) == ("exactly-once", "agrees", 0)
        assert stats["bytes"] == sum(p.stat().st_size for p in tree.iterdir())
        assert isinstance(stats["certificate"], dict)
        assert dataset.verify()
    assert orders[0] != orders[1] and list(range(SAMPLES)) not in orders


def test_stats_tell_what_came_from_sharing(server: Server, tree: Path) -> None:
    whole = sum(p.stat().st_size for p in tree.iterdir())
    # The first job leaves the dataset in the cache, whatever tests before it left there.
    first, second = epochs(server, "first-reader"), epochs(server, "second-reader")
    for dataset in (first, second):
        assert len(seen(iter(DataLoader(dataset)))) == SAMPLES
    stats = first.stats()
    assert stats["bytes"] == whole and 0 <= stats["shared_bytes"] <= whole
    # The server counts as shared what it did not read from the origin for this job.
    with urllib.request.urlopen(f"{server.url}/v1/accounts", timeout=10) as answer:
        jobs = {job["job"]: job for job in json.load(answer)["jobs"]}
    for name, dataset in (("first-reader", first), ("second-reader", second)):
        shared = jobs[name]["hit_bytes"] + jobs[name]["substituted_bytes"]
        assert dataset.stats()["shared_bytes"] == shared == whole - jobs[name]["miss_bytes"], jobs[name]


def test_a_sweep_that_is_too_small_is_logged_once(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = epochs(server, "small-sweep")
    assert not [r for r in caplog.records if "sweep" in r.message]
    small = {"sweep": {"capacity_bytes": 49, "total_bytes": 1000, "unit_bytes": 10}}
    for _ in range(2):
        dataset._warn_of_small_sweep(small)
    (record,) = [r for r in caplog.records if "sweep" in r.message]
    assert "holds 4 chunks of 10 bytes" in record.message


def test_a_batch_is_acknowledged_when_the_next_is_asked_for(server: Server, tree: Path) -> None:
    dataset = epochs(server, "acks")
    batches = iter(DataLoader(dataset))

    def acked() -> int:
        return dataset._job.info()["epochs"][0]["acked"]

    next(batches)
    assert acked() == 0
    next(batches)
    assert acked() == 8 == dataset.stats()["samples"]
    dataset.state_dict()
    assert acked() == 16


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_goes_on_where_it_was_taken(own_server: Server, workers: int) -> None:
    tree = make_tree(own_server)
    dataset = epochs(own_server, "broken-off")
    batches = iter(DataLoader(dataset, num_workers=workers))
    before = [n for _ in range(7) for n in next(batches).tolist()]
    state = dataset.state_dict()
    # Consumed after the state was taken: the model forgets it, and so does the epoch.
    next(batches)
    next(batches)
    del batches
    # The server loses all it had, and another takes over.
    own_server.kill()
    for name in ("cache", "state"):
        (own_server.scratch / name).rename(own_server.scratch / f"{name}.lost")
    own_server.start()
    tables = own_server.scratch / "tables-numbered"
    own_server.register("numbered", tree, tables)
    again = epochs(own_server, "broken-off")
    again.load_state_dict(state)
    after = seen(iter(DataLoader(again, num_workers=workers)))
    assert sorted(before + after) == list(range(SAMPLES))


def test_a_model_goes_back_to_its_checkpoint(server: Server, tree: Path) -> None:
    def dataset() -> EpochDataset:
        return epochs(server, "checkpoints", visitation="checkpoint")

    first = dataset()
    batches = iter(DataLoader(first))
    before = [n for _ in range(5) for n in next(batches).tolist()]
    saved = first.state_dict()
    assert saved["commit"] == 40 and first.state_dict()["commit"] == 40
    lost = [n for _ in range(3) for n in next(batches).tolist()]
    first.state_dict()
    del batches
    again = dataset()
    again.load_state_dict(saved)
    now = again._job.info()["epochs"][0]
    assert (now["acked"], now["commits"]) == (40, [40])
    after = seen(iter(DataLoader(again)))
    assert sorted(before + after) == list(range(SAMPLES)) and set(lost) < set(after)
    # The proof goes on where the model did.
    stats = again.stats()
    assert (stats["receipt"], stats["visitation"]) == ("agrees", "checkpoint")
    # A commit that is not remembered any more: the state itself says where.
    again.load_state_dict({**saved, "commit": 7})
    assert again._job.info()["epochs"][0]["acked"] == 40


@pytest.mark.parametrize("visitation", ["exactly-once", "checkpoint"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("loader", [DataLoader, torch.utils.data.DataLoader])
def test_a_state_of_an_epochs_end_is_followed_by_the_next_epoch(
    server: Server, tree: Path, loader: Any, workers: int, visitation: str
) -> None:
    job = f"end-{loader is DataLoader}-{workers}-{visitation}"
    first = epochs(server, job, visitation=visitation)
    seen(iter(DataLoader(first)))
    state = first.state_dict()
    if visitation == "checkpoint":
        # The model is lost, and what it was trained on since.
        next(iter(DataLoader(first)))
        first.state_dict()
    again = epochs(server, job, visitation=visitation)
    again.load_state_dict(state)
    assert (again.stats()["epoch"], again.stats()["receipt"]) == (0, "agrees")
    for epoch in range(state["epoch"] + 1, 3):
        assert sorted(seen(iter(loader(again, num_workers=workers)))) == list(range(SAMPLES))
        assert (again.stats()["epoch"], again.stats()["receipt"]) == (epoch, "agrees")
    # One that is named is the one that is meant.
    again.load_state_dict(state)
    again.set_epoch(4)
    assert sorted(seen(iter(loader(again, num_workers=workers)))) == list(range(SAMPLES))
    assert again.stats()["epoch"] == 4


def test_ranks_go_on_after_an_epochs_end_on_another_server(own_server: Server) -> None:
    tree = make_tree(own_server)
    before = [epochs(own_server, "end", rank=r, ranks=2) for r in range(2)]
    in_threads(before, 0)
    states = [d.state_dict() for d in before]
    own_server.kill()
    for name in ("cache", "state"):
        (own_server.scratch / name).rename(own_server.scratch / f"{name}.lost")
    own_server.start()
    own_server.register("numbered", tree, own_server.scratch / "tables-numbered")
    after = [epochs(own_server, "end", rank=r, ranks=2) for r in range(2)]
    # The last rank does not wait for the first one to tell the server.
    for dataset in reversed(after):
        dataset.load_state_dict(states[0])
        assert dataset.stats()["epoch"] == 0
    got = in_threads(after, 0)
    assert [len(of) for of in got] == [72, 72] and len(set(got[0] + got[1])) == 144
    assert [d.stats()["epoch"] for d in after] == [1, 1]


def test_what_ranks_saved_is_verified_by_the_command(server: Server, tree: Path, tmp_path: Path) -> None:
    dataset = epochs(server, "notes")
    seen(iter(DataLoader(dataset)))
    notes = tmp_path / "rank-0.notes"
    dataset.save_consumed_sum(notes)
    assert [p.name for p in tmp_path.iterdir()] == ["rank-0.notes"]

    def verify() -> int:
        command = [BIN / "fletch", "receipt", "verify", notes, "--job", "notes", "--epoch", "0"]
        return subprocess.run([*command, "--server", f"unix:{server.socket}"], check=False).returncode

    assert verify() == 0
    text = notes.read_text()
    notes.write_text(text.replace(f"sum {SAMPLES} ", f"sum {SAMPLES - 1} "))
    assert verify() == 1
    notes.write_text(text[:-5] + ("0" if text[-5] != "0" else "1") + text[-4:])
    assert verify() == 1


def test_notes_are_whole_lines_of_one_epoch(server: Server, tree: Path, tmp_path: Path) -> None:
    dataset = epochs(server, "lines", plan={"echo": {"copies": 2}})
    file = tmp_path / "0.notes"
    with pytest.raises(fletch.Invalid, match="no batch in hand"):
        dataset.append_consumption_log(file)
    for i, _ in enumerate(DataLoader(dataset, num_workers=2)):
        dataset.append_consumption_log(file)
        if i % 10 == 3:
            # A crash tore the next line, and another process goes on with the file.
            with open(file, "ab") as torn:
                torn.write(b"12 0 0123")
    text = file.read_text().splitlines()
    assert text[0] == f"fletch.notes 1 {dataset.root} 0" and len(text) == 1 + 2 * SAMPLES
    command = [BIN / "fletch", "receipt", "verify", file, "--job", "lines", "--epoch", "0"]
    command += ["--server", f"unix:{server.socket}"]
    assert subprocess.run(command, check=False).returncode == 0
    file.write_text("\n".join(text[:-1]) + "\n")
    assert subprocess.run(command, check=False).returncode == 1
    # A first line that was torn is written again; what is no file of notes of this epoch is left alone.
    for torn in ("", text[0][:20], text[0]):
        file.write_text(torn)
        consumption_log.append(file, f"{text[0]}\n", "more\n")
        assert file.read_text() == f"{text[0]}\nmore\n"
    for other in ("diary", text[0][:-1] + "7\n", "fletch.notes 1\n"):
        file.write_text(other)
        with pytest.raises(fletch.Invalid, match="begins with"):
            consumption_log.append(file, f"{text[0]}\n", "more\n")
        assert file.read_text() == other


@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize("order", ["strict", "substitute", "bucketed"])
def test_a_state_goes_on_with_another_number_of_ranks(own_server: Server, order: str, lost: bool) -> None:
    tree = make_tree(own_server)
    settings: dict[str, Any] = {"order": order, "seed": 7, "tail": "drop"}
    if order == "bucketed":
        settings["buckets"] = {"lengths": [1500]}

    def ranks(job: str, n: int) -> list[EpochDataset]:
        return [epochs(own_server, job, rank=r, ranks=n, batch_size=12 // n, **settings) for r in range(n)]

    def steps(loops: list[Iterator[torch.Tensor]], n: int) -> list[list[int]]:
        """The samples of all ranks in each of the next steps."""
        return [[i for loop in loops for i in next(loop).tolist()] for _ in range(n)]

    two = ranks("moves", 2)
    loops = [iter(DataLoader(d)) for d in two]
    before = steps(loops, 4)
    # Both ranks stepped (a barrier), and then one of them keeps the state.
    states = [d.state_dict() for d in two]
    steps(loops, 1)
    del loops
    if lost:
        own_server.kill()
        for name in ("cache", "state"):
            (own_server.scratch / name).rename(own_server.scratch / f"{name}.lost")
        own_server.start()
        own_server.register("numbered", tree, own_server.scratch / "tables-numbered")
    three = ranks("moves", 3)
    if not lost:
        with pytest.raises(fletch.Invalid) as error:
            next(iter(DataLoader(three[1])))
        assert error.value.code == "job_differs"
    for dataset in three:
        dataset.load_state_dict(states[1])
    loops = [iter(DataLoader(d)) for d in three]
    left = three[0].steps - 4
    after = steps(loops, left)
    assert all(next(loop, None) is None for loop in loops)
    every = [i for step in before + after for i in step]
    assert len(every) == len(set(every)) == three[0].steps * 12
    if order != "substitute":
        whole = ranks("whole", 3)
        assert steps([iter(DataLoader(d)) for d in whole], three[0].steps)[4:] == after


def test_two_ranks_share_an_epoch(server: Server, tree: Path) -> None:
    ranks = [epochs(server, "ranks", rank=r, ranks=2) for r in range(2)]
    got: dict[int, list[list[int]]] = {}

    def consume(rank: int) -> None:
        got[rank] = [batch.tolist() for batch in DataLoader(ranks[rank], num_workers=rank)]

    threads = [threading.Thread(target=consume, args=(r,)) for r in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    # 150 samples are 9 steps of 16, and the tail is dropped.
    assert [len(got[r]) for r in range(2)] == [9, 9] == [d.steps for d in ranks]
    assert all(len(batch) == 8 for r in range(2) for batch in got[r])
    every = [n for r in range(2) for batch in got[r] for n in batch]
    assert len(set(every)) == len(every) == 144
    sums = [dataset.consumed_sum() for dataset in ranks]
    stats = [dataset.stats() for dataset in ranks]
    assert all(s["receipt"] is None and s["certificate"]["delivered"] == 144 for s in stats)
    assert ranks[0].verify(sums[1:]) and ranks[1].verify(sums[:1])
    assert [dataset.stats()["receipt"] for dataset in ranks] == ["agrees"] * 2
    assert not ranks[0].verify() and not ranks[0].verify([sums[1], sums[1]])
    assert ranks[0].stats()["receipt"] == "differs"


@pytest.mark.parametrize("workers", [0, 2])
def test_no_step_of_two_ranks_mixes_buckets(server: Server, tree: Path, workers: int) -> None:
    bounds = [900, 1800]

    def bucket(sample: EpochSample) -> int:
        return sum(b <= len(sample.content) for b in bounds)

    settings = {"order": "bucketed", "buckets": {"lengths": bounds}, "transform": bucket, "ranks": 2}
    ranks = [epochs(server, f"buckets-{workers}", rank=r, **settings) for r in range(2)]
    steps = [[batch.tolist() for batch in DataLoader(d, num_workers=workers)] for d in ranks]
    sizes = collections.Counter(sum(b <= p.stat().st_size for b in bounds) for p in tree.iterdir())
    assert [len(s) for s in steps] == [ranks[0].steps] * 2 == [sum(n // 16 for n in sizes.values())] * 2
    assert all(len(set(a + b)) == 1 and len(a) == len(b) == 8 for a, b in zip(*steps))
    assert len({a[0] for a in steps[0]}) == 3
    assert ranks[0].verify([ranks[1].consumed_sum()])


def test_workers_do_not_change_a_known_order(server: Server, tree: Path) -> None:
    orders = []
    for workers in (0, 2):
        dataset = epochs(server, f"known-{workers}", order="strict", seed=4)
        orders.append([batch.tolist() for batch in DataLoader(dataset, num_workers=workers)])
    assert orders[0] == orders[1] and len(orders[0]) == 19


def test_buckets_are_of_one_order(server: Server, tree: Path) -> None:
    for settings in ({"order": "bucketed"}, {"buckets": {"lengths": [5]}}):
        with pytest.raises(fletch.Invalid) as error:
            epochs(server, "no-buckets", **settings)
        assert error.value.code == "bad_plan"


def in_threads(ranks: list[EpochDataset], workers: int) -> list[list[int]]:
    """Iterates all ranks at once in threads. Returns what each consumed, in order."""
    got: dict[int, list[int]] = {}

    def consume(rank: int) -> None:
        got[rank] = seen(iter(DataLoader(ranks[rank], num_workers=workers)))

    threads = [threading.Thread(target=consume, args=(r,)) for r in range(len(ranks))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    return [got[r] for r in range(len(ranks))]


def test_a_ledger_is_replayed(server: Server, tree: Path) -> None:
    first = [epochs(server, "told", rank=r, ranks=3, batch_size=5, tail="pad") for r in range(3)]
    order = in_threads(first, 0)
    ledger = first[0].ledger()
    settings = {"order": "replay", "replay": ledger, "ranks": 3, "tail": "pad"}
    again = [epochs(server, "told-again", rank=r, batch_size=4, **settings) for r in range(3)]
    for _ in range(2):
        assert in_threads(again, 0) == order
        assert again[0].verify([d.consumed_sum() for d in again[1:]])
    assert [d.consumed_sum() for d in again] == [d.consumed_sum() for d in first]
    damaged = bytearray(ledger)
    damaged[len(ledger) // 2] ^= 1
    for bad in ({"replay": bytes(damaged)}, {"seed": 5}):
        with pytest.raises(fletch.Invalid) as error:
            epochs(server, "told-wrong", rank=0, **{**settings, **bad})
        assert error.value.code == "bad_ledger"


def test_a_selection_is_delivered_exactly(server: Server, tree: Path, tmp_path: Path) -> None:
    chosen = sorted(random.Random(8).sample(range(SAMPLES), SAMPLES // 10))
    by_key, by_number = tmp_path / "some.csv", tmp_path / "numbers.csv"
    by_key.write_text("label,path\n" + "".join(f"x,{n:04}\n" for n in chosen))
    by_number.write_text("number,weight\n" + "".join(f"{n},{i}\n" for i, n in enumerate(chosen)))
    keys = Selection(by_key, keys="path")
    for name, select, plan in (
        ("keys", keys, None),
        ("numbers", by_number, None),
        ("twice", str(by_number), {"echo": {"copies": 2}}),
    ):
        dataset = epochs(server, f"select-{name}", select=select, plan=plan)
        copies = 1 if plan is None else 2
        for _ in range(2):
            assert sorted(seen(iter(DataLoader(dataset)))) == sorted(chosen * copies)
            assert dataset.stats()["receipt"] == "agrees"
    weighted = Selection(by_number, weights="weight", draws=210)
    drawn = collections.Counter(seen(iter(DataLoader(epochs(server, "select-weights", select=weighted)))))
    assert drawn == {n: 2 * i for i, n in enumerate(chosen) if i > 0}


@pytest.mark.parametrize("order", ["substitute", "strict"])
@pytest.mark.parametrize("workers", [0, 4])
def test_copies_of_a_sample_keep_their_distance_in_the_loop(
    server: Server, tree: Path, order: str, workers: int
) -> None:
    copies, apart = 3, 24
    plan = {"echo": {"copies": copies, "apart": apart}}
    settings: dict[str, Any] = {"plan": plan, "order": order, "batch_size": 8}
    dataset = epochs(server, f"apart-{order}-{workers}", transform=number_at_own_pace, **settings)
    order_seen = seen(iter(DataLoader(dataset, num_workers=workers)))
    assert len(order_seen) == copies * SAMPLES
    last: dict[int, int] = {}
    distances = []
    for at, sample in enumerate(order_seen):
        if sample in last:
            distances.append(at - last[sample])
        last[sample] = at
    assert min(distances) >= apart, f"{min(distances)} apart"
    assert dataset.stats()["receipt"] == "agrees"


def test_what_is_no_selection_is_said(server: Server, tree: Path, tmp_path: Path) -> None:
    file = tmp_path / "bad.csv"

    def why(text: str, **settings: Any) -> str:
        file.write_text(text)
        with pytest.raises(fletch.Invalid) as error:
            epochs(server, "select-bad", **{"select": file, **settings})
        return str(error.value)

    said = why("key,label\n0001,3\n", select=Selection(file, keys="path"))
    assert "has no column path; it has key, label" in said
    said = why("key\n0001\nnone\n0002\nnowhere\n")
    assert '2 keys name no sample of the version, among them "none", "nowhere"' in said
    assert 'more than once, among them "0001"' in why("key\n0001\n0001\n")
    assert "names sample 150" in why("number\n150\n")
    assert "give one of them" in why("number\n1\n", plan={"base": "all"})
    assert "draws is 3, and weights is not given" in why("number\n1\n", select=Selection(file, draws=3))
    with pytest.raises(fletch.NotFound):
        epochs(server, "select-bad", select=tmp_path / "absent.csv")


def test_a_state_of_another_version_changes_nothing(server: Server, tree: Path) -> None:
    dataset = epochs(server, "foreign-state")
    batches = iter(DataLoader(dataset))
    got = next(batches).tolist()
    state = dataset.state_dict()
    with pytest.raises(fletch.Invalid, match="is of version"):
        dataset.load_state_dict({**state, "root": "0" * 64})
    # And one that the server refuses: the loop goes on, and its proof.
    other = epochs(server, "foreign-seed", seed=9)
    next(iter(DataLoader(other)))
    got += next(batches).tolist() + next(batches).tolist()
    with pytest.raises(fletch.Invalid) as error:
        dataset.load_state_dict({**state, "state": other.state_dict()["state"]})
    assert error.value.code == "state_differs"
    got += seen(batches)
    assert sorted(got) == list(range(SAMPLES)) and dataset.stats()["receipt"] == "agrees"


def one_of_two(rank: int, socket: str, meet: str, out: str) -> None:
    """The program of a process of a data-parallel job that names its rank nowhere."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    client = fletch.Client(f"unix:{socket}", job="distributed", timeout=20)
    dataset = EpochDataset(client, "numbered", job="distributed", batch_size=4, transform=number, tail="pad")
    got = seen(iter(DataLoader(dataset)))
    Path(f"{out}-{rank}").write_text(json.dumps([dataset.rank, dataset.ranks, dataset.steps, got]))
    torch.distributed.destroy_process_group()


def test_rank_and_world_come_from_torch_distributed(server: Server, tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "got"
    torch.multiprocessing.spawn(one_of_two, (str(server.socket), str(tmp_path / "meet"), str(out)), 2)
    said = [json.loads(Path(f"{out}-{rank}").read_text()) for rank in range(2)]
    assert [s[:3] for s in said] == [[0, 2, 19], [1, 2, 19]]
    # 150 samples in 19 steps of 8: two fill up the last one.
    assert [len(s[3]) for s in said] == [76, 76]
    assert set(said[0][3]) | set(said[1][3]) == set(range(SAMPLES))


def test_lengths_are_samples_and_steps(server: Server, tree: Path) -> None:
    cases = (("keep", 1, 150, 19), ("drop", 1, 144, 18), ("drop", 2, 72, 9), ("pad", 2, 80, 10))
    for tail, ranks, samples, steps in cases:
        dataset = epochs(server, f"len-{tail}-{ranks}", rank=0, ranks=ranks, tail=tail)
        assert (len(dataset), dataset.steps, len(DataLoader(dataset))) == (samples, steps, steps)
        if ranks == 1:
            # Torch's own loader counts batches of its own size, and schedules are as long as it says.
            loader = torch.utils.data.DataLoader(dataset, batch_size=10)
            assert len(loader) == -(-samples // 10) == len(list(loader))


def test_views_come_from_workers(server: Server, tree: Path) -> None:
    client = fletch.Client(f"unix:{server.socket}", timeout=20)
    by_index = MapDataset(client.resolve("numbered"))
    expected = sorted(p.read_bytes() for p in tree.iterdir())
    by_epoch = epochs(server, "views", transform=None)
    others = {"collate_fn": list, "num_workers": 1, "timeout": 60}
    for loader in (
        DataLoader(by_index, 16, **others),
        torch.utils.data.DataLoader(by_index, 16, **others),
        DataLoader(by_epoch, **others),
        torch.utils.data.DataLoader(by_epoch, 16, **others),
    ):
        views = [view for batch in loader for view in batch]
        assert sorted(map(bytes, views)) == expected
        assert all(isinstance(v, memoryview) and v.readonly and v.format == "B" for v in views)


def test_other_views_keep_format_and_shape() -> None:
    numbers = memoryview(bytearray(range(24)))
    shaped = (numbers.cast("H"), numbers.cast("B", (2, 3, 4)), numbers[::3])
    for view in (*shaped, memoryview(b""), numbers.cast("I")[:0]):
        arrived = pickle.loads(multiprocessing.reduction.ForkingPickler.dumps(view))
        assert (arrived.format, arrived.shape, arrived.tolist()) == (view.format, view.shape, view.tolist())
        assert arrived.readonly


def test_a_rank_that_nobody_named_is_refused(
    server: Server, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    how = "after torch.distributed.init_process_group, or give rank and ranks"
    with pytest.raises(fletch.Invalid, match=how):
        epochs(server, "unnamed")
    assert epochs(server, "named", rank=1, ranks=2).rank == 1
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert epochs(server, "unnamed").ranks == 1


def test_a_batch_is_no_longer_than_a_lease(server: Server, tree: Path) -> None:
    limit = "batch_size is 4097; a batch is a lease, which has 1 to 4096 samples"
    with pytest.raises(fletch.Invalid, match=limit):
        epochs(server, "too-long", batch_size=4097)
    longest = epochs(server, "longest", batch_size=4096)
    assert sorted(seen(iter(DataLoader(longest)))) == list(range(SAMPLES))


def test_workers_hold_no_more_than_a_rank_may(
    server: Server, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One worker's batch would not be to be had while the others hold theirs.
    monkeypatch.setattr(fletch._native, "HELD_MAX", 109)
    dataset = epochs(server, "crowded", batch_size=10)
    held = "4 workers with 2 batches each may hold 130 samples, and a rank may hold 109"
    with pytest.raises(fletch.Invalid, match=held):
        DataLoader(dataset, num_workers=4)
    DataLoader(dataset, num_workers=4, prefetch_factor=1)
    strict = epochs(server, "crowded-strict", batch_size=10, order="strict")
    with pytest.raises(fletch.Invalid, match="may hold 130 samples"):
        DataLoader(strict, num_workers=4, prefetch_factor=1)


def test_under_another_loader_it_is_at_most_once(server: Server, tree: Path) -> None:
    dataset = epochs(server, "plain")
    got = seen(iter(torch.utils.data.DataLoader(dataset, batch_size=10)))
    assert sorted(got) == list(range(SAMPLES))
    assert (dataset.stats()["visitation"], dataset.stats()["receipt"]) == ("at-most-once", "agrees")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("persistent", [False, True])
def test_under_another_loader_with_workers_epochs_follow_each_other(
    server: Server, tree: Path, method: str, persistent: bool
) -> None:
    dataset = epochs(server, f"plain-{method}-{persistent}")
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=10, num_workers=3, multiprocessing_context=method, persistent_workers=persistent
    )
    length = sum(p.stat().st_size for p in tree.iterdir())
    for epoch in range(3):
        assert sorted(seen(iter(loader))) == list(range(SAMPLES)), epoch
        stats = dataset.stats()
        assert (stats["epoch"], stats["samples"], stats["bytes"]) == (epoch, SAMPLES, length)
        assert (stats["visitation"], stats["receipt"]) == ("at-most-once", "agrees")
        assert stats["certificate"] is not None and dataset.verify()
    dataset.set_epoch(7)
    assert sorted(seen(iter(loader))) == list(range(SAMPLES))
    assert (dataset.stats()["epoch"], dataset.stats()["samples"]) == (7, SAMPLES)
    # And with this package's own loader it is exactly once again.
    assert sorted(seen(iter(DataLoader(dataset)))) == list(range(SAMPLES))
    stats = dataset.stats()
    assert (stats["epoch"], stats["visitation"], stats["receipt"]) == (8, "exactly-once", "agrees")


def test_another_loader_with_one_seed_and_any_number_of_workers(server: Server, tree: Path) -> None:
    dataset = epochs(server, "plain-seed")
    for epoch, workers in enumerate([2, 3, 1, 0, 3]):
        again = torch.Generator().manual_seed(5)
        loader = torch.utils.data.DataLoader(dataset, 8, num_workers=workers, generator=again)
        assert sorted(seen(iter(loader))) == list(range(SAMPLES)), epoch
        stats = dataset.stats()
        assert (stats["epoch"], stats["samples"], stats["receipt"]) == (epoch, SAMPLES, "agrees")


def test_a_loop_that_stops_with_the_last_batch_has_ended_its_epoch(server: Server, tree: Path) -> None:
    dataset = epochs(server, "plain-last")
    loader = torch.utils.data.DataLoader(dataset, SAMPLES, num_workers=1, persistent_workers=True)
    for epoch in range(3):
        assert sorted(next(iter(loader)).tolist()) == list(range(SAMPLES)), epoch
    alone = epochs(server, "plain-last-alone")
    for epoch in range(2):
        items = iter(alone)
        assert sorted(next(items) for _ in range(SAMPLES)) == list(range(SAMPLES))
        assert alone.stats()["epoch"] == epoch
    # One that is named is that one, whatever is left of it.
    alone.set_epoch(0)
    with pytest.raises(fletch.Invalid, match="epoch 0 was finished before"):
        list(torch.utils.data.DataLoader(alone, num_workers=2))
    assert (alone.stats()["epoch"], alone.stats()["samples"]) == (0, 0)
    # A copy of it, as checkpoints are pickled, is of its own.
    copied = copy.deepcopy(dataset._worker_table)
    copied.set_epoch(9)
    assert (dataset.stats()["epoch"], copied.latest().epoch) == (2, 9)


@pytest.mark.parametrize("kind", ["own", "own-with-workers", "torchs", "torchs-with-workers", "alone"])
def test_a_finished_epoch_is_an_error_and_the_next_one_can_be_asked_for(
    server: Server, tree: Path, kind: str
) -> None:
    def script(epoch: int | Literal["next"] = 0, named: bool = False) -> list[int]:
        """The number of samples of each of two epochs."""
        dataset = epochs(server, f"again-{kind}", epoch=epoch)
        loaders: dict[str, Callable[[], Any]] = {
            "own": lambda: DataLoader(dataset),
            "own-with-workers": lambda: DataLoader(dataset, num_workers=2),
            "torchs": lambda: torch.utils.data.DataLoader(dataset),
            "torchs-with-workers": lambda: torch.utils.data.DataLoader(dataset, 8, num_workers=3),
            "alone": lambda: dataset,
        }
        loader, counts = loaders[kind](), []
        for n in range(2):
            if named:
                dataset.set_epoch(n)
            counts.append(sum(1 if kind == "alone" else len(batch) for batch in loader))
        return counts

    assert script() == [SAMPLES, SAMPLES]
    for named in (False, True):
        with pytest.raises(fletch.Invalid) as caught:
            script(named=named)
        said = str(caught.value)
        for part in (f"job again-{kind}, epoch 0 was finished before", 'epoch="next" (now 2)', "another job"):
            assert part in said, said
        assert f"fletch jobs delete again-{kind}" in said
        assert not any(verb in said for verb in ("GET ", "POST ", "PUT ", "DELETE ")), said
        if kind == "own":
            assert caught.value.code == "epoch_closed" and caught.value.hint in said
    assert script(epoch="next") == [SAMPLES, SAMPLES]
    assert script(epoch=4) == [SAMPLES, SAMPLES]


def test_the_next_epoch_is_the_one_that_was_left(server: Server, tree: Path) -> None:
    first = epochs(server, "left", epoch="next")
    assert first.epoch == 0
    assert sorted(seen(iter(DataLoader(first)))) == list(range(SAMPLES))
    next(iter(DataLoader(first)))
    again = epochs(server, "left", epoch="next")
    assert again.epoch == 1
    with pytest.raises(fletch.Invalid, match='"next"'):
        epochs(server, "left", epoch="last")


def test_what_this_loader_has_in_hand_is_not_waited_for_by_another(server: Server, tree: Path) -> None:
    dataset = epochs(server, "plain-mixed")
    got = next(iter(DataLoader(dataset))).tolist()
    other = torch.utils.data.DataLoader(dataset, 10, num_workers=2)
    with pytest.raises(fletch.Invalid, match="with a batch in hand"):
        next(iter(other))
    dataset.state_dict()
    got += seen(iter(other))
    assert sorted(got) == list(range(SAMPLES))
    stats = dataset.stats()
    assert (stats["samples"], stats["visitation"], stats["receipt"]) == (SAMPLES, "at-most-once", "agrees")


def test_another_loader_that_is_left_goes_on_in_its_epoch(own_server: Server) -> None:
    make_tree(own_server)
    dataset = epochs(own_server, "plain-left")
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=2)
    left = iter(loader)
    got = next(left).tolist() + next(left).tolist()
    del left
    rest = seen(iter(torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=3)))
    # At most once: what was acknowledged and never handed out is not seen again.
    assert len(set(got + rest)) == len(got + rest) and rest
    stats = dataset.stats()
    assert (stats["epoch"], stats["samples"], stats["receipt"]) == (0, SAMPLES, "agrees")
    assert sorted(seen(iter(loader))) == list(range(SAMPLES))
    assert dataset.stats()["epoch"] == 1


class Killed:
    """A transform that kills its worker once."""

    def __init__(self, flag: str) -> None:
        self.flag = flag

    def __call__(self, sample: EpochSample) -> int:
        if number(sample) == 77 and not os.path.exists(self.flag):
            open(self.flag, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return number(sample)


def test_what_a_killed_worker_held_comes_again(own_server: Server, tmp_path: Path) -> None:
    make_tree(own_server)
    dataset = epochs(own_server, "killed", transform=Killed(str(tmp_path / "flag")))
    consumed: list[int] = []
    batches = iter(DataLoader(dataset, num_workers=2))
    with pytest.raises(RuntimeError, match="exited unexpectedly|killed by signal"):
        for batch in batches:
            consumed += batch.tolist()
    del batches
    # The step of the last batch was made: only what was not consumed comes again.
    dataset.state_dict()
    rest = epochs(own_server, "killed")
    consumed += seen(iter(DataLoader(rest)))
    assert collections.Counter(consumed) == collections.Counter(range(SAMPLES))


class Refusing:
    """A transform that raises once."""

    def __init__(self, flag: str) -> None:
        self.flag = flag

    def __call__(self, sample: EpochSample) -> int:
        if number(sample) == 77 and not os.path.exists(self.flag):
            open(self.flag, "x").close()
            raise ValueError("not this one")
        return number(sample)


@pytest.mark.parametrize("which", ["own", "own, 2 workers", "torch's, 2 that live"])
def test_what_a_transform_raised_at_comes_again(own_server: Server, tmp_path: Path, which: str) -> None:
    make_tree(own_server)
    dataset = epochs(own_server, "refused", transform=Refusing(str(tmp_path / "flag")))
    if which.startswith("own"):
        loader: Any = DataLoader(dataset, num_workers=2 if "2" in which else 0)
    else:
        loader = torch.utils.data.DataLoader(dataset, 8, num_workers=2, persistent_workers=True)
    got: list[int] = []
    with pytest.raises(ValueError, match="not this one"):
        for batch in loader:
            got += batch.tolist()
    # This process and its workers live on, and do not renew what nobody got.
    if which.startswith("own"):
        dataset.state_dict()
        got += seen(iter(loader))
        assert collections.Counter(got) == collections.Counter(range(SAMPLES))
        assert dataset.stats()["receipt"] == "agrees"
    else:
        rest = seen(iter(loader))
        assert 77 in rest and len(set(got + rest)) == len(got + rest)
    assert dataset.stats()["epoch"] == 0 and sorted(seen(iter(loader))) == list(range(SAMPLES))
    assert (dataset.stats()["epoch"], dataset.stats()["receipt"]) == (1, "agrees")


class Broken:
    """A torch iterator that yields one batch, and then loses the connection to a worker."""

    def __init__(self, *workers: multiprocessing.process.BaseProcess) -> None:
        self._workers = workers

    def __iter__(self) -> Iterator[lease_stream.Batch]:
        yield lease_stream.Batch(None)
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))


def test_a_connection_that_broke_with_its_worker_is_that_workers_death() -> None:
    context = multiprocessing.get_context("spawn")
    living, dying, ended = (context.Process(target=time.sleep, args=(s,)) for s in (600, 600, 0))
    for worker in (living, dying, ended):
        worker.start()
    try:
        dying.kill()
        got = iteration._received(Broken(living, dying), 2)
        assert next(got) == lease_stream.Batch(None)
        with pytest.raises(RuntimeError, match=rf"pid\(s\) {dying.pid}\) exited unexpectedly"):
            next(got)
        # Where no worker was killed, and where there is none, it is an error like any other.
        ended.join()
        for workers, made in ((2, Broken(living, ended)), (0, Broken())):
            with pytest.raises(ConnectionResetError):
                list(iteration._received(made, workers))
    finally:
        living.kill()
        living.join()
        dying.join()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_was_left_is_taken_up_again(own_server: Server, workers: int) -> None:
    make_tree(own_server)
    dataset = epochs(own_server, "left")
    loader = DataLoader(dataset, num_workers=workers)
    batches, consumed = iter(loader), []
    for _ in range(4):
        consumed += next(batches).tolist()
    # The fifth batch is in hand, and its step is never made. The iterator is kept, and must not keep leases.
    next(batches)
    kept = batches
    batches.close()
    consumed += seen(iter(loader))
    assert collections.Counter(consumed) == collections.Counter(range(SAMPLES))
    assert dataset.stats()["receipt"] == "agrees"
    del kept


def counted(loader: DataLoader, ends: str) -> list[int]:
    """The batches of a loop that counts its steps, and so does not ask for one more."""
    if ends == "zip":
        return [n for _, batch in zip(range(len(loader)), loader) for n in batch.tolist()]
    return [n for batch in itertools.islice(loader, len(loader)) for n in batch.tolist()]


@pytest.mark.parametrize("tail", ["keep", "drop", "pad"])
@pytest.mark.parametrize("ends", ["zip", "islice"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_counts_its_steps_goes_from_epoch_to_epoch(
    server: Server, tree: Path, workers: int, ends: str, tail: str
) -> None:
    dataset = epochs(server, f"counted-{workers}-{ends}-{tail}", tail=tail)
    loader = DataLoader(dataset, num_workers=workers)
    per_epoch = {"keep": 150, "drop": 144, "pad": 152}[tail]
    for epoch in (0, 1, 4):
        if epoch == 4:
            dataset.set_epoch(4)
        got = counted(loader, ends)
        assert (len(got), len(set(got))) == (per_epoch, min(per_epoch, SAMPLES)) and dataset.epoch == epoch
    assert dataset.state_dict()["finished"] and dataset.verify()
    assert counted(loader, ends) and dataset.epoch == 5
    there = {e["epoch"]: (e["state"], e["redelivered"]) for e in dataset._job.info()["epochs"]}
    assert [there[epoch] for epoch in (0, 1, 4)] == [("finished", 0)] * 3


def test_ranks_that_count_their_steps_go_from_epoch_to_epoch(server: Server, tree: Path) -> None:
    ranks = [epochs(server, "counted-ranks", rank=r, ranks=2) for r in range(2)]
    loaders = [DataLoader(dataset) for dataset in ranks]
    for epoch in range(3):
        loops = [itertools.islice(loader, len(loader)) for loader in loaders]
        got = [n for batches in zip(*loops) for batch in batches for n in batch.tolist()]
        assert len(set(got)) == len(got) == 144 and [d.epoch for d in ranks] == [epoch] * 2
    assert [e["redelivered"] for e in ranks[0]._job.info()["epochs"]] == [0] * 3


def test_settings_that_cannot_be(server: Server, tree: Path) -> None:
    client = fletch.Client(server.url)
    plan = {"base": {"keys": ["nothing"]}}
    for bad in ({"rank": 2, "ranks": 2}, {"rank": 0}, {"batch_size": 0}, {"plan": plan}):
        with pytest.raises(fletch.Invalid):
            EpochDataset(client, "numbered", job="bad", **{"batch_size": 4, **bad})
    with pytest.raises(fletch.NotFound):
        EpochDataset(client, "absent", job="bad", batch_size=4)
    epochs(server, "mine")
    with pytest.raises(fletch.Invalid) as caught:
        epochs(server, "mine", batch_size=9)
    assert caught.value.code == "job_differs"
    persistent = {"num_workers": 1, "persistent_workers": True}
    for bad in ({"shuffle": True}, {"batch_size": 5}, {"sampler": [1]}, persistent):
        with pytest.raises(ValueError):
            DataLoader(epochs(server, "mine"), **bad)
    few = epochs(server, "few", plan={"base": {"keys": ["0003", "0005", "0009"]}}, batch_size=2)
    assert sorted(seen(iter(DataLoader(few)))) == [3, 5, 9] and few.verify()
