"""Random transforms are repeatable to the bit, whatever the number and the pace of workers."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.utils.data

import fletch
from fletch.torch import DataLoader, EpochDataset, EpochSample
from fletch.epochs.sample_seeds import SampleSeeds
from conftest import Server

SAMPLES = 90

#: The seed of the first copy of sample 7 in epoch 3 of a job whose seed is that of the name "train-7".
FIXED = 6_327_475_668_825_739_073


@pytest.fixture(scope="module")
def tree(server: Server) -> Path:
    tree = server.scratch / "tree-repeatable"
    tree.mkdir()
    for i in range(SAMPLES):
        (tree / f"{i:04}").write_bytes(i.to_bytes(4, "little") * 50)
    server.publish("repeatable", tree)
    return tree


def augmented(sample: EpochSample) -> torch.Tensor:
    """A sample's number, and a number of each generator. Workers differ in speed, so batches overtake."""
    worker = torch.utils.data.get_worker_info()
    time.sleep(0 if worker is None else worker.id * 0.002)
    own = random.Random(sample.seed).random()
    drawn = [random.random(), float(numpy.random.rand()), float(torch.rand(1, dtype=torch.float64)), own]
    return torch.tensor([float(sample.number), *drawn], dtype=torch.float64)


def mixed(items: list[torch.Tensor]) -> torch.Tensor:
    """A ``collate_fn`` that uses chance too."""
    rows = torch.stack(items)
    rows[:, 1:] += torch.rand(1, dtype=torch.float64)
    return rows


def epochs(server: Server, job: str, **settings: Any) -> EpochDataset:
    client = fletch.Client(f"unix:{server.socket}", job=job, timeout=20)
    settings = {"batch_size": 8, "transform": augmented, "order": "strict", "seed": 5, **settings}
    return EpochDataset(client, "repeatable", job=job, **settings)


def read(dataset: EpochDataset, workers: int, collate: Any = torch.stack) -> list[torch.Tensor]:
    return [batch.clone() for batch in DataLoader(dataset, num_workers=workers, collate_fn=collate)]


def by_number(batches: list[torch.Tensor]) -> dict[float, list[float]]:
    return {row[0]: row[1:] for row in torch.cat(batches).tolist()}


def test_strict_epochs_are_the_same_to_the_bit(server: Server, tree: Path) -> None:
    of_workers = []
    for workers in (0, 1, 3):
        # The state of the process's own generators makes no difference.
        torch.manual_seed(workers)
        random.seed(workers)
        dataset = epochs(server, f"strict-{workers}")
        of_workers.append([read(dataset, workers, mixed), read(dataset, workers, mixed)])
        assert dataset.stats()["receipt"] == "agrees"
    for first, second in zip(of_workers, of_workers[1:]):
        for a, b in zip(first, second):
            assert len(a) == len(b) == -(-SAMPLES // 8)
            assert all(torch.equal(x, y) for x, y in zip(a, b))
    # Another epoch draws other numbers, also for the same sample.
    one, two = (by_number(epoch) for epoch in of_workers[0])
    assert all(one[number] != two[number] for number in one)


def test_an_interrupted_epoch_goes_on_to_the_bit(server: Server, tree: Path) -> None:
    whole = read(epochs(server, "resume-whole"), 2)
    dataset = epochs(server, "resume-cut")
    got = []
    for batch in DataLoader(dataset, num_workers=2, collate_fn=torch.stack):
        got.append(batch.clone())
        if len(got) == 4:
            break
    state = dataset.state_dict()
    again = epochs(server, "resume-cut")
    again.load_state_dict(state)
    got += read(again, 0)
    assert len(got) == len(whole) and all(torch.equal(a, b) for a, b in zip(got, whole))


def test_in_any_order_a_samples_transform_is_the_same(server: Server, tree: Path) -> None:
    expected = by_number(read(epochs(server, "any-strict"), 0))
    for workers in (0, 2):
        # A sample draws the same numbers at every place in the epoch.
        dataset = epochs(server, f"any-{workers}", order="substitute")
        assert by_number(read(dataset, workers)) == expected
    items = torch.utils.data.DataLoader(epochs(server, "any-torch"), batch_size=None, num_workers=2)
    assert {row[0]: row[1:] for row in torch.stack(list(items)).tolist()} == expected


def test_copies_and_jobs_draw_different_numbers(server: Server, tree: Path) -> None:
    twice = torch.cat(read(epochs(server, "copies", plan={"echo": {"copies": 2, "apart": 4}}), 0))
    assert len(twice) == 2 * SAMPLES and len(twice[:, 1].unique()) == 2 * SAMPLES
    a, b = (by_number(read(epochs(server, f"seed-{seed}", seed=seed), 0)) for seed in (6, 7))
    assert all(a[number] != b[number] for number in a)


def test_the_loops_own_generators_go_on(server: Server, tree: Path) -> None:
    def drawn(batches: Any) -> list[float]:
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        got = []
        for _ in batches:
            got += [random.random(), float(torch.rand(1)), float(numpy.random.rand())]
        return got

    # A loader of torch draws one number for its workers.
    plain = torch.utils.data.DataLoader(range(-(-SAMPLES // 8)), batch_size=None)
    assert drawn(DataLoader(epochs(server, "own"), num_workers=0)) == drawn(plain)


def test_a_seed_is_fixed_for_good() -> None:
    seeds = SampleSeeds(11_142_698_902_253_167_184, 3)
    assert seeds.of_sample(7, 0) == FIXED
    others = [seeds.of_sample(7, 1), seeds.of_sample(8, 0), seeds.of_sample(7, None), seeds.of_batch(7, 0)]
    assert len({FIXED, *others, SampleSeeds(0, 3).of_sample(7, 0), SampleSeeds(5, 4).of_sample(7, 0)}) == 7
