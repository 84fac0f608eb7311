"""Whole passes for evaluation, and errors that name their sample.

Whatever happened to earlier passes, the next one has each sample once.
"""

from __future__ import annotations

import collections
import itertools
import json
import logging
import os
import signal
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Iterator

import pytest
import torch.utils.data
from PIL import Image, UnidentifiedImageError

import fletch
from conftest import Server, serving
from fletch.torch import SKIP, DataLoader, EpochSample, EvalDataset, EvalSample, ImageFolder, MapDataset
from fletch.epochs import sample_errors
from fletch.torch import evaluation
from test_epochs import SAMPLES, epochs, keyed, make_tree, number, texts

__all__ = ["keyed"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server of this module, so that its jobs are known."""
    with serving("--limits-lease-ttl", "10s") as server:
        make_tree(server)
        yield server


def passes(server: Server, **settings: Any) -> EvalDataset:
    client = fletch.Client(f"unix:{server.socket}", timeout=20)
    return EvalDataset(client, "numbered", **{"transform": number, **settings})


def seen(batches: Any) -> list[int]:
    return [n for batch in batches for n in batch.tolist()]


class ValidationLoop:
    """The calls with which Lightning reads a loader: a sanity check, limited and whole validations."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def sanity_check(self, steps: int = 2) -> list[int]:
        batches = iter(self.loader)
        return seen(next(batches) for _ in range(min(steps, len(self.loader))))

    def validate(self, limit_val_batches: int | float = 1.0) -> list[int]:
        batches = len(self.loader)
        most = limit_val_batches if isinstance(limit_val_batches, int) else int(batches * limit_val_batches)
        got = []
        for at, batch in enumerate(self.loader):
            if at >= most:
                break
            got += batch.tolist()
        return got


def error_of(loader: Any, kind: Any) -> BaseException:
    """The error of this kind that ends a loop over a loader, or over its iterator."""
    batches = iter(loader)
    with pytest.raises(kind) as caught:
        list(batches)
    if hasattr(batches, "_shutdown_workers"):
        # The error refers to the iterator. Torch takes seconds to end workers of one that is garbage.
        batches._shutdown_workers()
    return caught.value


def disturb(loader: Any) -> None:
    """Peeks into a loader, breaks off, fails in mid-pass, and limits the batches."""
    loop = ValidationLoop(loader)
    peeked = seen([next(iter(loader))])
    assert loop.sanity_check()[: len(peeked)] == peeked
    assert loop.validate(limit_val_batches=2) == loop.validate(limit_val_batches=2)
    with pytest.raises(ZeroDivisionError):
        for _ in loader:
            1 / 0
    held = iter(loader)
    next(held)


@pytest.mark.parametrize(("ranks", "workers"), list(itertools.product((1, 2, 3), (0, 2))))
def test_every_pass_is_whole(server: Server, ranks: int, workers: int) -> None:
    shares = []
    for rank in range(ranks):
        dataset = passes(server, rank=rank, ranks=ranks)
        loader = DataLoader(dataset, batch_size=8, num_workers=workers)
        assert (loader.batch_size, loader.dataset) == (8, dataset)
        disturb(loader)
        batches = list(loader)
        assert len(batches) == len(loader) == -(-len(dataset) // 8)
        assert all(len(batch) == 8 for batch in batches[:-1])
        # The same again, in order, also by torch's own loader and by a new dataset, as after a restart.
        share = seen(batches)
        again = passes(server, rank=rank, ranks=ranks, batch_size=8)
        own = torch.utils.data.DataLoader(again, 8, num_workers=workers)
        if ranks == 1:
            disturb(own)
        assert len(own) == len(batches)
        assert seen(own) == seen(DataLoader(again, num_workers=workers)) == share == sorted(share)
        assert len(share) == len(dataset)
        shares.append(share)
    assert sorted(sum(shares, [])) == list(range(SAMPLES))
    sizes = {len(share) for share in shares}
    assert max(sizes) - min(sizes) <= 1


def test_spawned_workers_make_whole_passes(server: Server) -> None:
    dataset = passes(server, rank=1, ranks=2)
    loader = DataLoader(
        dataset, batch_size=8, num_workers=2, multiprocessing_context="spawn", persistent_workers=True
    )
    next(iter(loader))
    assert seen(loader) == seen(loader) == list(range(SAMPLES // 2, SAMPLES))


def test_passes_leave_no_job_and_can_overlap(server: Server) -> None:
    before = urllib.request.urlopen(f"{server.url}/v1/jobs").read()
    loader = DataLoader(passes(server), batch_size=8)
    for first, second in zip(loader, loader):
        assert first.tolist() == second.tolist()
    assert list(passes(server)) == list(range(SAMPLES))
    assert json.loads(urllib.request.urlopen(f"{server.url}/v1/jobs").read()) == json.loads(before)


def test_a_killed_worker_takes_nothing_from_the_next_pass(server: Server) -> None:
    loader = DataLoader(passes(server), batch_size=4, num_workers=2)
    batches: Any = iter(loader)
    next(batches)
    os.kill(batches._workers[1].pid, signal.SIGKILL)
    # Torch notices it by a signal, by a worker that is gone, or by a connection that broke.
    error_of(batches, (RuntimeError, EOFError, OSError))
    assert seen(loader) == list(range(SAMPLES))


def marked(sample: EvalSample) -> tuple[int, bool]:
    return number(sample), sample.repeated


@pytest.mark.parametrize("workers", [0, 2])
def test_padding_makes_ranks_equal_and_says_so(server: Server, workers: int) -> None:
    got = []
    for rank in range(4):
        dataset = passes(server, rank=rank, ranks=4, pad=True, transform=marked)
        assert len(dataset) == 38
        batches = list(DataLoader(dataset, batch_size=5, num_workers=workers))
        assert len(batches) == 8
        got += [(n, r) for ns, rs in batches for n, r in zip(ns.tolist(), rs.tolist())]
    assert sorted(n for n, repeated in got if not repeated) == list(range(SAMPLES))
    assert [n for n, repeated in got if repeated] == [0, 75]
    few = {"samples": lambda sample: sample.key == "0007", "pad": True, "transform": marked}
    each = [list(passes(server, rank=rank, ranks=3, **few)) for rank in range(3)]
    assert each == [[(7, True)], [(7, True)], [(7, False)]]


def test_samples_are_chosen_and_have_keys(server: Server, keyed: None, monkeypatch: Any) -> None:
    client = fletch.Client(f"unix:{server.socket}", timeout=20)
    version = client.resolve("keyed")
    named = EvalDataset(client, "keyed", transform=lambda s: (s.key, s.number, s.ordinal, texts(s.content)))
    every = list(named)
    expected = [texts(content) for content in MapDataset(version)]
    assert [content for *_, content in every] == expected
    places = [(s.key, number, s.ordinals[0]) for number, s in enumerate(version.samples())]
    assert [place for *place, _ in every] == [list(place) for place in places]
    # Also if every sample is a read of its own, and for a list of samples.
    monkeypatch.setattr(evaluation, "_READ_BYTES_MAX", 1)
    chosen = version.samples()[3:5]
    content = EvalDataset(client, "keyed", samples=chosen, transform=lambda s: (s.number, texts(s.content)))
    assert list(content) == list(zip((3, 4), expected[3:5]))
    raw = DataLoader(EvalDataset(client, "numbered"), 8, num_workers=1, collate_fn=list)
    assert [int.from_bytes(view[:4], "little") for batch in raw for view in batch] == list(range(SAMPLES))


def test_settings_of_a_pass(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    other = fletch.Client(server.url).resolve("numbered").samples()
    for bad in (
        {"rank": 2, "ranks": 2}, {"rank": 0}, {"batch_size": 0}, {"on_error": "ignore"},
        {"pad": True, "transform": None}, {"samples": lambda sample: sample.key.startswith("val/")},
        {"samples": []},
    ):
        with pytest.raises(fletch.Invalid):
            passes(server, **bad)
    with pytest.raises(fletch.NotFound):
        EvalDataset(fletch.Client(server.url), "absent")
    with pytest.raises(ValueError, match="give one of them"):
        DataLoader(passes(server, batch_size=8), batch_size=9)
    with pytest.raises(ValueError, match="shuffle"):
        DataLoader(passes(server), batch_size=8, shuffle=True)
    assert len(DataLoader(passes(server), batch_size=8, drop_last=True)) == SAMPLES // 8
    with caplog.at_level(logging.WARNING, "fletch"):
        assert list(passes(server, rank=0, ranks=2, samples=other[:1])) == []
    assert "1 samples for 2 ranks, so rank 0 has none" in caplog.text


class IterableDatasetShard(torch.utils.data.IterableDataset[Any]):
    """Takes every second item, as the class of this name in `accelerate` and `transformers` takes a part."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        for at, element in enumerate(self.dataset):
            if at % 2 == 0:
                yield element


class DataLoaderDispatcher(torch.utils.data.DataLoader[Any]):
    """Iterates on the first process only, as the class of this name in `accelerate`."""

    def __iter__(self) -> Any:
        main_iterator = super().__iter__()
        yield from main_iterator


@pytest.mark.parametrize("method", [None, "fork", "spawn"])
def test_a_share_is_not_shared_again(server: Server, method: str | None) -> None:
    workers = {"num_workers": 1 if method else 0, "multiprocessing_context": method}
    half, whole = passes(server, rank=0, ranks=2), passes(server)
    wrapped: list[Any] = [DataLoaderDispatcher(half, 8, **workers)]
    if method != "spawn":
        wrapped.append(torch.utils.data.DataLoader(IterableDatasetShard(half), 8, **workers))
    for loader in wrapped:
        assert "MapDataset" in str(error_of(loader, fletch.Invalid))
    assert seen(DataLoaderDispatcher(whole, 8, **workers)) == list(range(SAMPLES))


def test_the_shard_of_accelerate_is_refused(server: Server) -> None:
    accelerate = pytest.importorskip("accelerate.data_loader", reason="tests/install.sh installs it")
    # Newer releases wrap a loader in place of being one.
    assert isinstance(accelerate.DataLoaderDispatcher, type)
    for rank in range(2):
        shard = accelerate.IterableDatasetShard(passes(server, rank=rank, ranks=2), 8, False, 2, rank)
        with pytest.raises(fletch.Invalid, match=f"rank {rank} of 2"):
            list(shard)
    whole = [list(accelerate.IterableDatasetShard(passes(server), 5, False, 2, rank)) for rank in range(2)]
    assert sorted(sum(whole, [])) == list(range(SAMPLES))




# Errors that name their sample.


def fails_at_seven(sample: Any) -> int:
    """A transform that one sample breaks."""
    view = sample.content if isinstance(sample, (EpochSample, EvalSample)) else sample
    n = int.from_bytes(view[:4], "little")
    if n == 7:
        raise ValueError("cannot decode")
    return n


def said_by(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_names_its_sample(server: Server, workers: int) -> None:
    version = fletch.Client(server.url).resolve("numbered")
    own, plain = DataLoader, torch.utils.data.DataLoader
    dataset = passes(server, transform=fails_at_seven)
    by_index = MapDataset(version, fails_at_seven)
    epoch = epochs(server, f"named-{workers}", transform=fails_at_seven)
    broken = [
        (own(epoch, num_workers=workers), "number 7, "),
        *((loader(dataset, 8, num_workers=workers), "number 7, ") for loader in (own, plain)),
        *((loader(by_index, 8, num_workers=workers), "") for loader in (own, plain)),
    ]
    for loader, of_number in broken:
        said = said_by(error_of(loader, ValueError))
        assert f"transform failed for the sample 0007 ({of_number}ordinal 7)" in said
        assert "cannot decode" in said


def test_an_image_that_cannot_be_decoded_is_named(server: Server) -> None:
    tree = server.scratch / "tree-broken"
    (tree / "cat").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tree / "cat" / "0.png")
    (tree / "cat" / "1.png").write_bytes(b"no image")
    server.publish("broken", tree)
    images = ImageFolder(fletch.Client(server.url).resolve("broken"))
    assert images[0][1] == 0
    with pytest.raises(UnidentifiedImageError) as caught:
        images[1]
    assert "cat/1.png (ordinal 1)" in said_by(caught.value)


def refuses_eight(items: list[int]) -> torch.Tensor:
    """A collation that one sample breaks."""
    if 8 in items:
        raise TypeError("shapes differ")
    return torch.tensor(items)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_batch_names_its_samples(server: Server, workers: int) -> None:
    for dataset in (epochs(server, f"collated-{workers}"), passes(server, batch_size=8)):
        loader = DataLoader(dataset, num_workers=workers, collate_fn=refuses_eight)
        said = said_by(error_of(loader, TypeError))
        assert "shapes differ" in said and "collate_fn failed for a batch of" in said
        assert "0008 (number 8, ordinal 8)" in said
    # Of the pass, exactly the batch.
    assert "a batch of 8 samples: 0008 (" in said and "0015 (" in said and "0016 (" not in said


def test_notes_keep_the_type_of_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_errors, "sys", SimpleNamespace(version_info=(3, 10)))
    long = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad byte")
    every: list[BaseException] = [
        ValueError("bad"), ValueError(), ValueError(3), KeyError("k"), OSError(5, "I/O error"),
        OSError("bad"), long,
    ]
    for error in every:
        kind = type(error)
        sample_errors.add_note(error, "in sample x")
        assert type(error) is kind and "in sample x" in str(error), repr(error)
    refused = fletch.NotFound("there is no label", code="not_found")
    sample_errors.add_note(refused, "in sample x")
    assert refused.args == ("there is no label",) and refused.__notes__ == ["in sample x"]


def fails_below_twelve(sample: Any) -> int:
    if sample.number < 12:
        raise ValueError(f"{sample.number} is broken")
    return number(sample)


@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_samples_are_counted(
    server: Server, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"transform": fails_below_twelve, "on_error": "skip", "batch_size": 8}
    plan = {"base": {"keys": [f"{i:04}" for i in range(12)]}}
    dataset = epochs(server, f"skips-{workers}", **settings)
    with caplog.at_level(logging.WARNING, "fletch"):
        batches = list(DataLoader(dataset, num_workers=workers))
    assert sorted(seen(batches)) == list(range(12, SAMPLES))
    assert all(len(batch) > 0 for batch in batches)
    stats = dataset.stats()
    assert (stats["samples"], stats["skipped"], stats["receipt"]) == (SAMPLES, 12, "agrees")
    if workers == 0:
        assert "is skipped" in caplog.text and "is broken" in caplog.text
        # Ten one by one; later ones are counted.
        assert caplog.text.count("is skipped") == 10
    # Every batch is passed over, and the epoch still ends with its receipt.
    nothing = epochs(server, f"all-skipped-{workers}", plan=plan, **settings)
    assert list(DataLoader(nothing, num_workers=workers)) == []
    stats = nothing.stats()
    assert (stats["batches"], stats["skipped"], stats["receipt"]) == (2, 12, "agrees")
    nothing = epochs(server, f"none-single-{workers}", plan=plan, **settings)
    assert list(torch.utils.data.DataLoader(nothing, 8, num_workers=workers)) == []
    assert (nothing.stats()["skipped"], nothing.stats()["receipt"]) == (12, "agrees")
    single = epochs(server, f"single-{workers}", **settings)
    batches = list(torch.utils.data.DataLoader(single, 8, num_workers=workers))
    assert sorted(seen(batches)) == list(range(12, SAMPLES))
    assert single.stats()["skipped"] == 12
    evaluated = passes(server, **settings)
    assert sorted(seen(DataLoader(evaluated, num_workers=workers))) == list(range(12, SAMPLES))
    assert evaluated.stats() == {"samples": SAMPLES - 12, "skipped": 12}


def replaced(error: Exception, sample: Any) -> Any:
    assert str(sample.number) in str(error)
    return SKIP if sample.number == 3 else -1


def away(sample: Any) -> int:
    raise fletch.Unavailable("the label server is away", retryable=True)


def test_a_callable_decides(server: Server) -> None:
    settings = {"transform": fails_below_twelve, "on_error": replaced}
    for dataset in (epochs(server, "replaces", **settings), passes(server, batch_size=8, **settings)):
        got = collections.Counter(seen(DataLoader(dataset, num_workers=1)))
        assert got[-1] == 11 and dataset.stats()["skipped"] == 1
        assert sum(got.values()) == SAMPLES - 1
    with pytest.raises(fletch.Unavailable, match="label server"):
        list(passes(server, transform=away, on_error="skip"))
    with pytest.raises(fletch.Invalid, match="on_error is 'ignore'"):
        epochs(server, "ignores", on_error="ignore")


# An epoch that passes in silence, settings that differ, and states.


def test_an_epoch_without_a_step_is_an_error(server: Server) -> None:
    plan = {"base": {"keys": ["0001", "0002"]}}
    dataset = epochs(server, "no-step", plan=plan, rank=0, ranks=2)
    assert dataset.steps == 0
    with pytest.raises(fletch.Invalid, match='fewer than the 16 of one step .*tail="pad"'):
        list(DataLoader(dataset))


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        ({"seed": 7}, {}, "give seed= as"),
        ({}, {"batch_size": 9}, "batch_size="),
        ({}, {"order": "strict"}, "give order= as"),
        ({}, {"plan": {"base": {"keys": ["0001"]}}}, "select="),
    ],
)
def test_other_settings_are_named_in_python(
    server: Server, first: dict[str, Any], second: dict[str, Any], names: str
) -> None:
    job = f"differs-{sorted(first) or sorted(second)}".translate({ord(c): None for c in "[]' ,"})
    epochs(server, job, **first)
    with pytest.raises(fletch.Invalid) as caught:
        epochs(server, job, **second)
    assert caught.value.code == "job_differs"
    assert names in str(caught.value) and names in caught.value.hint
    assert f"fletch jobs delete {job}" in caught.value.hint


def test_another_number_of_ranks_needs_a_state(server: Server) -> None:
    next(iter(DataLoader(epochs(server, "ranks-differ", rank=0, ranks=1))))
    more = epochs(server, "ranks-differ", rank=0, ranks=2)
    with pytest.raises(fletch.Invalid, match=r"load_state_dict\(\)") as caught:
        next(iter(DataLoader(more)))
    assert caught.value.code == "job_differs"


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list, tuple)):
        assert type(value) in (dict, list, tuple)
        for one in value.values() if isinstance(value, dict) else value:
            yield from leaves(one)
    else:
        yield value


def test_states_are_plain_values(server: Server, tmp_path: Path) -> None:
    dataset = epochs(server, "plain", visitation="checkpoint")
    next(iter(DataLoader(dataset)))
    state = dataset.state_dict()
    # What torch 2.6 and later load with `weights_only=True`; torch 1.13 cannot load bytes so.
    assert {type(leaf) for leaf in leaves(state)} <= {str, bytes, int, bool, type(None)}
    torch.save(state, tmp_path / "state.pt")
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6):
        assert torch.load(tmp_path / "state.pt", weights_only=True) == state
