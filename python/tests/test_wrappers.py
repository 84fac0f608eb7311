"""Frameworks that build loaders of their own: exactly once and whole, or an error that says what to write.

Small stand-ins make the calls of Lightning, transformers, accelerate and torchdata. `make accept-frameworks`
runs the frameworks themselves.
"""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Iterator

import pytest
import torch.distributed
import torch.utils.data

import fletch
from conftest import Server, serving
from fletch.torch import DataLoader, EpochDataset, EvalDataset, MapDataset
from fletch.epochs import states
from fletch.torch import wrappers
from test_epochs import SAMPLES, epochs, make_tree, number, seen

STAND_INS = Path(__file__).parent / "stand_ins"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--limits-lease-ttl", "3s") as server:
        make_tree(server)
        yield server


def consumed(dataset: EpochDataset) -> int:
    """The samples of all epochs of a job that the server counts as consumed."""
    return sum(epoch["acked"] for epoch in dataset._job.info()["epochs"])


# Stand-ins. Their names are those of the classes of accelerate, transformers and torchdata.


class DataLoaderShard(torch.utils.data.DataLoader[Any]):
    """One process, one batch ahead; can skip batches."""

    def __init__(self, dataset: Any, skip_batches: int = 0, **settings: Any) -> None:
        super().__init__(dataset, **settings)
        self.skip_batches = skip_batches

    def __iter__(self) -> Any:
        self.inner = batches = super().__iter__()
        following = next(batches, None)
        at = 0
        while following is not None:
            current, following = following, next(batches, None)
            if at >= self.skip_batches:
                yield current
            at += 1


class SkipDataLoader(DataLoaderShard):
    """What `skip_first_batches` makes of a loader that is not prepared."""


class DataLoaderDispatcher(torch.utils.data.DataLoader[Any]):
    """The first process iterates, and sends the others their parts."""

    def __init__(self, dataset: Any, num_processes: int, **settings: Any) -> None:
        super().__init__(dataset, **settings)
        self.state = SimpleNamespace(num_processes=num_processes)

    def __iter__(self) -> Any:
        self.inner = super().__iter__()
        yield from self.inner


class IterableDatasetShard(torch.utils.data.IterableDataset[Any]):
    """Every process takes each n-th item."""

    def __init__(self, dataset: Any, num_processes: int, batch_size: int = 1) -> None:
        self.dataset, self.num_processes, self.batch_size = dataset, num_processes, batch_size

    def __iter__(self) -> Any:
        for at, item in enumerate(self.dataset):
            if at % self.num_processes == 0:
                yield item


class StatefulDataLoader(torch.utils.data.DataLoader[Any]):
    """Saves the states of datasets by rules of its own."""

    def __iter__(self) -> Any:
        self.inner = super().__iter__()
        yield from self.inner


class UnknownLoader(torch.utils.data.DataLoader[Any]):
    """A loader of a framework that this package does not know."""

    def __iter__(self) -> Any:
        self.inner = super().__iter__()
        yield from self.inner


def refusal(loader: Any) -> str:
    """The error with which a loader refuses to iterate."""
    inner: Any = None
    with pytest.raises(fletch.Invalid) as caught:
        inner = iter(loader)
        list(inner)
    # Torch takes seconds to end workers of an iterator that is garbage.
    for batches in (inner, getattr(loader, "inner", None)):
        if hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()
    return str(caught.value)


def rebuilt(loader: Any, kind: Any, **more: Any) -> Any:
    """A loader that a framework builds of another one's attributes."""
    copied = ("batch_size", "num_workers", "collate_fn", "pin_memory", "timeout", "multiprocessing_context")
    return kind(loader.dataset, **{name: getattr(loader, name) for name in copied}, **more)


WORKERS = pytest.mark.parametrize(("workers", "method"), [(0, None), (2, "fork"), (1, "spawn")])


@WORKERS
def test_a_loader_that_is_built_of_ours_is_refused(server: Server, workers: int, method: str | None) -> None:
    dataset = epochs(server, f"rebuilt-{workers}-{method}")
    loader = DataLoader(dataset, num_workers=workers, multiprocessing_context=method)
    assert loader.dataset is dataset
    kinds = [DataLoaderShard, SkipDataLoader, StatefulDataLoader, UnknownLoader]
    # Spawned workers take seconds.
    for kind in kinds[:1] if method == "spawn" else kinds:
        said = refusal(rebuilt(loader, kind))
        assert "fletch.torch.DataLoader" in said and "EpochTrainer" in said or kind is StatefulDataLoader
    with pytest.raises(fletch.Invalid, match="another loader was built"):
        loader.collate_fn([1])
    # Nothing was consumed.
    assert consumed(dataset) == 0
    if method != "spawn":
        assert sorted(seen(iter(loader))) == list(range(SAMPLES))
        assert dataset.stats()["receipt"] == "agrees"


@WORKERS
def test_an_epoch_is_not_divided_again(server: Server, workers: int, method: str | None) -> None:
    dataset = epochs(server, f"divided-{workers}-{method}", rank=0, ranks=2)
    whole = epochs(server, f"whole-{workers}-{method}")
    settings = {"batch_size": 8, "num_workers": workers, "multiprocessing_context": method}
    for one in (whole,) if method == "spawn" else (dataset, whole):
        for loader in (
            DataLoaderDispatcher(one, 2, **settings),
            torch.utils.data.DataLoader(IterableDatasetShard(one, 2), **settings),
        ):
            # Spawned workers of a shard find it in their own process, the others on the parent's stack.
            said = refusal(loader)
            assert "would give each process a part" in said
            assert "EpochTrainer" in said and "do not give it to prepare()" in said
        assert consumed(one) == 0


@WORKERS
def test_batches_of_an_epoch_are_not_skipped(server: Server, workers: int, method: str | None) -> None:
    dataset = epochs(server, f"skipped-{workers}-{method}")
    settings = {"batch_size": 8, "num_workers": workers, "multiprocessing_context": method}
    for kind in (SkipDataLoader,) if method == "spawn" else (DataLoaderShard, SkipDataLoader):
        said = refusal(kind(dataset, skip_batches=3, **settings))
        assert "skips 3 batches" in said and "load_state_dict()" in said
    assert consumed(dataset) == 0
    if method == "spawn":
        return
    assert "has state_dict()" in refusal(StatefulDataLoader(dataset, **settings))
    assert consumed(dataset) == 0
    # Nothing is skipped: one process, which has every sample.
    got = seen(iter(DataLoaderShard(dataset, **settings)))
    assert sorted(got) == list(range(SAMPLES))


def test_wrappers_of_passes_and_indices_have_every_sample(server: Server) -> None:
    version = fletch.Client(server.url).resolve("numbered")
    by_index = MapDataset(version, lambda view: int.from_bytes(view[:4], "little"))
    client = fletch.Client(server.url)
    whole = EvalDataset(client, "numbered", transform=number, rank=0, ranks=1)
    for workers in (0, 2):
        for dataset in (whole, by_index):
            loader = DataLoader(dataset, 8, num_workers=workers)
            assert loader.batch_size == 8 and not hasattr(loader, "state_dict")
            for kind in (DataLoaderShard, StatefulDataLoader):
                # The order of several workers is that of torch's loader.
                assert sorted(seen(iter(rebuilt(loader, kind)))) == list(range(SAMPLES))
            if workers == 0:
                skipping = rebuilt(loader, SkipDataLoader, skip_batches=2)
                assert seen(iter(skipping)) == list(range(16, SAMPLES))
        divided = [seen(iter(torch.utils.data.DataLoader(IterableDatasetShard(whole, 2), 8))) for _ in (0, 1)]
        assert divided == [list(range(0, SAMPLES, 2))] * 2
    # It would fill its last batch with samples that metrics count again.
    repeats = torch.utils.data.DataLoader(IterableDatasetShard(whole, 2, batch_size=8), 8)
    assert "150 is no multiple of 16: give the wrapper a MapDataset" in refusal(repeats)


def test_accelerate_itself(server: Server) -> None:
    accelerate = pytest.importorskip("accelerate", reason="tests/install.sh installs it")
    accelerator = accelerate.Accelerator(cpu=True)
    dataset = epochs(server, "accelerate")
    assert "prepare()" in refusal(accelerator.prepare(DataLoader(dataset)))
    skipped = accelerate.skip_first_batches(DataLoader(dataset), 2)
    assert "skips 2 batches" in refusal(skipped)
    assert consumed(dataset) == 0
    version = fletch.Client(server.url).resolve("numbered")
    by_index = MapDataset(version, lambda view: int.from_bytes(view[:4], "little"))
    for loader in (DataLoader(by_index, 8), DataLoader(by_index, 8, shuffle=True)):
        assert sorted(seen(iter(accelerator.prepare(loader)))) == list(range(SAMPLES))
    accelerator.register_for_checkpointing(DataLoader(dataset))


# Trainers that continue from a checkpoint.


class _TrainingEpochLoop:
    """The loop of Lightning that begins the iterations after the first one."""

    def on_run_start(self, loader: Any) -> Any:
        return iter(loader)


class _FitLoop:
    """The loop of Lightning that begins the first iteration."""

    def __init__(self, restarting: bool = False, overfit_batches: int = 0) -> None:
        self.restarting, self.trainer = restarting, SimpleNamespace(overfit_batches=overfit_batches)
        self._combined_loader_states_to_load: list[Any] = []

    def setup_data(self, loader: Any) -> Any:
        return iter(loader)

    def with_another_sampler(self, dataset: Any) -> Any:
        return DataLoader(dataset, sampler=torch.utils.data.SequentialSampler(dataset))


class Trainer:
    """The trainer of transformers."""

    def _run_epoch(self, loader: Any, resume_from_checkpoint: str | None) -> Any:
        return iter(loader)


def kinds_of_loader(dataset: EpochDataset) -> list[Any]:
    plain = torch.utils.data.DataLoader
    ours = [DataLoader(dataset, num_workers=workers) for workers in (0, 1)]
    return ours + [plain(dataset, 8, num_workers=workers) for workers in (0, 1)]


def test_a_trainer_does_not_continue_without_a_state(server: Server) -> None:
    fresh = epochs(server, "resumes-fresh")
    starts: list[Callable[[Any], Any]] = [
        lambda loader: _FitLoop(restarting=True).setup_data(loader),
        lambda loader: Trainer()._run_epoch(loader, "checkpoint-30"),
    ]
    # A job of which nothing was consumed has no hole.
    for start in starts:
        start(DataLoader(fresh)).close()
    begun = epochs(server, "resumes-begun")
    batches = iter(DataLoader(begun))
    first = [next(batches).tolist(), next(batches).tolist()]
    state = begun.state_dict()
    for loader in kinds_of_loader(epochs(server, "resumes-begun")):
        for start, remedy in zip(starts, ("give it fletch.torch.DataLoader", "EpochTrainer")):
            with pytest.raises((fletch.Invalid, RuntimeError), match=f"without a state .*{remedy}"):
                next(iter(start(loader)))
    said = refusal(DataLoaderShard(epochs(server, "resumes-begun"), batch_size=8))
    assert "without a state" in said and "register_for_checkpointing(loader)" in said
    # With the state it goes on.
    loaded = epochs(server, "resumes-begun")
    loaded.load_state_dict(state)
    got = seen(starts[0](DataLoader(loaded)))
    assert sorted(got + sum(first, [])) == list(range(SAMPLES))


def begin_late(worker: int) -> None:
    """Makes every worker but the first one begin when the first one has consumed samples."""
    time.sleep(worker)


@pytest.mark.parametrize("persistent", [False, True])
def test_samples_of_sibling_workers_do_not_refuse_a_worker(server: Server, persistent: bool) -> None:
    # A new job: the checkpoint is of another one, or has no state.
    dataset = epochs(server, f"siblings-{persistent}")
    loader = torch.utils.data.DataLoader(
        dataset, 8, num_workers=2, worker_init_fn=begin_late, persistent_workers=persistent
    )
    for _ in range(2):
        got = seen(_FitLoop(restarting=True).setup_data(loader))
        assert sorted(got) == list(range(SAMPLES))
        if not persistent:
            break


def test_lightning_keeps_the_state_of_an_epochs_end(server: Server) -> None:
    dataset = epochs(server, "kept-state")
    assert sorted(seen(iter(DataLoader(dataset)))) == list(range(SAMPLES))
    state = dataset.state_dict()
    # The process is lost within the next epoch, and the model goes back to the end of this one.
    batches = iter(DataLoader(dataset))
    assert len([next(batches), next(batches)]) == 2
    batches.close()
    loop = _FitLoop()
    loop._combined_loader_states_to_load = [{"job": "another"}, state]
    loaded = epochs(server, "kept-state")
    assert sorted(seen(loop.setup_data(DataLoader(loaded)))) == list(range(SAMPLES))
    assert loaded.epoch == 1
    # Once: the state stays in the loop, and the next epoch follows.
    assert sorted(seen(loop.setup_data(DataLoader(loaded)))) == list(range(SAMPLES))
    assert loaded.epoch == 2


def rests(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged of jobs that go on without a state."""
    return [record.getMessage() for record in caplog.records if "goes on in epoch" in record.getMessage()]


def test_a_job_that_goes_on_without_a_state_says_so(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    first = epochs(server, "goes-on")
    batches = iter(DataLoader(first))
    assert len([next(batches), next(batches)]) == 2
    # It counts the batch in hand as consumed.
    state = first.state_dict()
    batches.close()
    assert rests(caplog) == []
    left = SAMPLES - 16
    second = epochs(server, "goes-on")
    assert next(iter(torch.utils.data.DataLoader(second, 8))).numel() == 8
    [said] = rests(caplog)
    assert f"goes on in epoch 0 with {left} of {SAMPLES} samples left, and no state was loaded" in said
    assert "load_state_dict()" in said and "another job name" in said
    # Neither a second time nor with a state.
    next(iter(DataLoader(second)))
    loaded = epochs(server, "goes-on")
    loaded.load_state_dict(state)
    rest = seen(iter(DataLoader(loaded)))
    assert len(rest) == left and len(rests(caplog)) == 1
    # The next epoch begins from its start.
    assert len(seen(iter(DataLoader(loaded)))) == SAMPLES and len(rests(caplog)) == 1


def test_lightning_repeats_no_batch_of_an_epoch(server: Server) -> None:
    dataset = epochs(server, "overfit")
    with pytest.raises(fletch.Invalid, match="overfit_batches .* MapDataset"):
        _FitLoop(overfit_batches=2).setup_data(DataLoader(dataset))
    with pytest.raises(fletch.Invalid, match="overfit_batches .* MapDataset"):
        _FitLoop(overfit_batches=2).with_another_sampler(dataset)
    with pytest.raises(ValueError, match="makes its own batches"):
        _FitLoop().with_another_sampler(dataset)
    assert consumed(dataset) == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_lightning_counts_batches_and_each_is_trained_once(server: Server, workers: int) -> None:
    # `limit_train_batches`: it asks for no batch after the last one of each of its epochs.
    dataset = epochs(server, f"limited-{workers}")
    loader = DataLoader(dataset, num_workers=workers)
    got: list[int] = []
    batches = _FitLoop().setup_data(loader)
    while len(got) < SAMPLES:
        for _ in range(5):
            batch = next(batches, None)
            got += [] if batch is None else batch.tolist()
        batches = _TrainingEpochLoop().on_run_start(loader)
    assert sorted(got) == list(range(SAMPLES))


# Two ranks of torch.distributed.


def on_two_ranks(folder: Path, work: Callable[[int], Any]) -> list[Any]:
    """Runs a function as two ranks, in two forked processes. Returns their results."""
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()

    def rank(number: int) -> None:
        store = f"file://{folder}/store"
        torch.distributed.init_process_group("gloo", init_method=store, rank=number, world_size=2)
        try:
            results.put((number, work(number)))
            torch.distributed.barrier()
        except BaseException as error:
            results.put((number, repr(error)))
            raise

    ranks = [context.Process(target=rank, args=(number,)) for number in (0, 1)]
    for one in ranks:
        one.start()
    got = dict(results.get(timeout=60) for _ in ranks)
    for one in ranks:
        one.join(60)
        assert one.exitcode == 0, got
    return [got[0], got[1]]


def test_samples_of_other_ranks_do_not_refuse_a_late_rank(server: Server, tmp_path: Path) -> None:
    url = f"unix:{server.socket}"

    def work(rank: int) -> Any:
        # Rank 1 makes its dataset when rank 0 has consumed its share.
        time.sleep(rank)
        dataset = EpochDataset(fletch.Client(url, timeout=20), "numbered", job="late-rank", batch_size=5,
                               transform=number)
        return seen(_FitLoop(restarting=True).setup_data(torch.utils.data.DataLoader(dataset, 5)))

    got = on_two_ranks(tmp_path, work)
    assert sorted(sum(got, [])) == list(range(SAMPLES))


def test_a_state_of_rank_0_has_the_steps_of_all_ranks(server: Server, tmp_path: Path) -> None:
    url = f"unix:{server.socket}"

    def work(rank: int) -> Any:
        dataset = epochs(server, "two-ranks", order="strict", batch_size=5, seed=7)
        batches = iter(DataLoader(dataset))
        got = sum((next(batches).tolist() for _ in range(3)), [])
        # The other rank comes late, and no barrier follows.
        time.sleep(rank * 0.7)
        state = dataset.state_dict()
        torch.distributed.barrier()
        # The rest of the epoch is consumed, and the state takes it back.
        got_later = [n for batch in batches for n in batch.tolist()]
        torch.distributed.barrier()
        shared = [state]
        torch.distributed.broadcast_object_list(shared, src=0)
        loaded = EpochDataset(fletch.Client(url, timeout=20), "numbered", job="two-ranks", batch_size=5,
                              transform=number, order="strict", seed=7)
        # Rank 0 is late, and no barrier follows.
        time.sleep((1 - rank) * 0.7)
        loaded.load_state_dict(shared[0])
        again = [n for batch in DataLoader(loaded) for n in batch.tolist()]
        return got, got_later, again

    (first, later, again), (first_of_1, later_of_1, again_of_1) = on_two_ranks(tmp_path, work)
    assert set(first + first_of_1).isdisjoint(again + again_of_1)
    assert set(first + first_of_1 + again + again_of_1) == set(range(SAMPLES))
    # In a strict order the restored rank repeats what it had after the state.
    assert (again, again_of_1) == (later, later_of_1)


def test_a_state_that_lacks_a_rank_says_so(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "_STATE_SECONDS", 0.3)

    def work(rank: int) -> str:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("fletch").addHandler(handler)
        dataset = epochs(server, "alone", tail="pad")
        next(iter(DataLoader(dataset)))
        if rank == 0:
            dataset.state_dict()
        torch.distributed.barrier()
        return "\n".join(said)

    alone, other = on_two_ranks(tmp_path, work)
    assert "the state lacks 8 samples" in alone and "on every rank" in alone
    assert other == ""


# Hugging Face's trainer.


@pytest.fixture
def hugging_face(monkeypatch: pytest.MonkeyPatch) -> Any:
    if importlib.util.find_spec("transformers") is None:
        monkeypatch.syspath_prepend(str(STAND_INS))
    pytest.importorskip("transformers")
    from fletch.torch import hugging_face

    return hugging_face


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen += x.tolist()
        return {"loss": (self.linear(x.float().unsqueeze(1)) ** 2).mean()}


def as_item(sample: Any) -> dict[str, int]:
    return {"x": number(sample)}


def trainer(hugging_face: Any, dataset: Any, folder: Path, **settings: Any) -> Any:
    import transformers

    few = {"num_train_epochs": 1, "per_device_train_batch_size": 8, "save_steps": 5, "save_strategy": "steps"}
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_strategy": "no"}
    args = transformers.TrainingArguments(str(folder), **{**few, **quiet, **settings})
    return hugging_face.EpochTrainer(Model(), args, train_dataset=dataset)


def test_a_trainer_over_epochs_continues(hugging_face: Any, server: Server, tmp_path: Path) -> None:
    def dataset() -> EpochDataset:
        return epochs(server, "trainer", transform=as_item)

    class Stops(Exception):
        pass

    def fails_at(one: Any, step: int) -> None:
        calls = [0]
        forward = one.model.forward

        def counted(x: torch.Tensor) -> Any:
            calls[0] += 1
            if calls[0] == step:
                raise Stops
            return forward(x)

        one.model.forward = counted
        with pytest.raises(Stops):
            one.train(resume_from_checkpoint=True)

    # Before the first checkpoint: a new model, and the job from its beginning.
    fails_at(trainer(hugging_face, dataset(), tmp_path), 4)
    second = trainer(hugging_face, dataset(), tmp_path)
    fails_at(second, 13)
    kept = second.model.seen[: 10 * 8]
    # A checkpoint that a kill cut short is passed over.
    (tmp_path / "checkpoint-15").mkdir()
    torch.save({}, tmp_path / "checkpoint-15" / "fletch.pt")
    with pytest.raises(fletch.Invalid, match="resume_from_checkpoint=True"):
        trainer(hugging_face, dataset(), tmp_path).train()
    with pytest.raises(fletch.Invalid, match="has no trainer_state.json"):
        trainer(hugging_face, dataset(), tmp_path).train(str(tmp_path / "checkpoint-15"))
    last = trainer(hugging_face, dataset(), tmp_path)
    last.train(resume_from_checkpoint=True)
    assert sorted(kept + last.model.seen) == list(range(SAMPLES))
    assert last.state.global_step == -(-SAMPLES // 8)


def test_a_trainer_over_epochs_names_what_does_not_fit(
    hugging_face: Any, server: Server, tmp_path: Path
) -> None:
    one = trainer(hugging_face, epochs(server, "unfit"), tmp_path, per_device_train_batch_size=4)
    with pytest.raises(fletch.Invalid, match="per_device_train_batch_size is 4, .* EpochDataset is 8"):
        one.train()
    saved = tmp_path / "checkpoint-5"
    saved.mkdir()
    (saved / "trainer_state.json").write_text("{}")
    torch.save({**epochs(server, "unfit").state_dict(), "ranks": (0, 2)}, saved / "fletch.pt")
    with pytest.raises(fletch.Invalid, match="saved on 2 ranks, and there are 1 now"):
        trainer(hugging_face, epochs(server, "unfit"), tmp_path).train(True)


def test_a_wrapper_is_found_by_its_names_only() -> None:
    # A method of any other class says nothing.
    wrappers.refuse_wrappers_of_epochs("job", 0, 2)
    wrappers.refuse_sharders_of_passes(0, 2, 150)
    wrappers.refuse_repeated_batches("job")
    assert not wrappers.is_begun_after_a_step()
