"""Trainings and evaluations with the frameworks themselves: exactly once and whole, or an error that helps.

`make accept-frameworks` runs them, and prints a table. Each test runs a script of this folder, on one rank or
under ``torchrun`` on two.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Iterator

import pytest

from conftest import Server, serving
from framework_scripts import SAMPLES, TWICE, WHOLE, Row, Script, publish_numbered

for framework in ("accelerate", "datasets", "lightning", "torchdata", "transformers"):
    pytest.importorskip(framework, reason="make accept-frameworks installs it")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server with 1,000 samples, whose leases expire soon after their holders end."""
    with serving("--limits-lease-ttl", "3s") as server:
        publish_numbered(server)
        yield server


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """The rows that hold, which are printed at the end."""
    lines: list[str] = []
    yield lines
    reporter = request.config.pluginmanager.getplugin("terminalreporter")
    for line in lines:
        reporter.write_line(line)


@pytest.fixture
def script(server: Server, tmp_path: Path, table: list[str]) -> Any:
    return lambda name, ranks: Script(server, tmp_path, name, ranks, table)


RANKS = pytest.mark.parametrize("ranks", [1, 2])


# Trainings that are killed, and continue by the means of their framework.


def one_rank_dies(place: str, count: int, ranks: int) -> list[Any]:
    """A kill of the last of several ranks alone."""
    return [place, count] if ranks == 1 else [place, count, ranks - 1]


@RANKS
def test_lightning_is_killed_and_continues(script: Any, ranks: int) -> None:
    # A kill between the first step and the first checkpoint would leave a new model with a begun job.
    kills = [["sanity", 1], ["sanity", 2], ["step", 37], ["validation", 20]]
    kills += [one_rank_dies("validation", 3, ranks), ["step", 40]]
    got = script("use_lightning.py", ranks).is_killed_and_finishes(f"lightning-{ranks}", kills, 2)
    assert got["trained"] == TWICE


@RANKS
def test_lightning_is_killed_in_a_validation_within_an_epoch(script: Any, ranks: int) -> None:
    # In the validations of steps 20 and 40.
    kills = [["validation", 10], ["validation", 20]]
    settings = {"trainer": {"val_check_interval": 20}, "max_epochs": 1}
    fit = script("use_lightning.py", ranks)
    got = fit.is_killed_and_finishes(f"within-{ranks}", kills, 1, **settings)
    assert got["trained"] == WHOLE


@RANKS
def test_lightning_saves_after_each_epoch_and_is_killed(script: Any, ranks: int) -> None:
    steps = -(-SAMPLES // (8 * ranks))
    kills = [["step", steps + 25], ["validation", 5], one_rank_dies("validation", 20, ranks)]
    fit = script("use_lightning.py", ranks)
    got = fit.is_killed_and_finishes(f"by-epoch-{ranks}", kills, 2, save_every="epoch")
    assert got["trained"] == TWICE


@RANKS
def test_epoch_trainer_is_killed_and_continues(script: Any, ranks: int) -> None:
    kills = [["step", 3], ["step", 37], ["validation", 20]]
    kills += [one_rank_dies("validation", 3, ranks), ["step", 40]]
    settings = {"save_every": 10, "eval": "whole", "resume": True}
    got = script("use_trainer.py", ranks).is_killed_and_finishes(f"trainer-{ranks}", kills, 2, **settings)
    assert got["trained"] == TWICE
    assert got["global_step"] == 2 * -(-SAMPLES // (8 * ranks))


def test_epoch_trainer_accumulates_gradients(script: Any) -> None:
    settings = {"save_every": 5, "resume": True, "args": {"gradient_accumulation_steps": 3}}
    got = script("use_trainer.py", 2).is_killed_and_finishes("accumulates", [["step", 31]], **settings)
    assert got["trained"] == TWICE


@RANKS
def test_accelerate_is_killed_and_continues(script: Any, ranks: int) -> None:
    kills = [["step", 37], ["validation", 20], one_rank_dies("validation", 3, ranks), ["step", 40]]
    loop = script("use_accelerate.py", ranks)
    got = loop.is_killed_and_finishes(f"accelerate-{ranks}", kills, 2, eval=True)
    assert got["trained"] == TWICE


# Trainings that cannot continue say what to write.


@RANKS
def test_lightning_does_not_continue_without_a_state(script: Any, ranks: int) -> None:
    job = {"job": f"stateless-{ranks}", "loader": "torch"}
    fit = script("use_lightning.py", ranks)
    assert fit.start({**job, "die": ["step", 37]}) != 0
    [got] = fit.results(job)
    assert re.search("without a state .* give it fletch.torch.DataLoader", got["says"])


def test_trainer_itself_does_not_continue(script: Any) -> None:
    job = {"job": "plain", "plain": True, "save_every": 10}
    training = script("use_trainer.py", 1)
    assert training.start({**job, "die": ["step", 37]}) != 0
    for more in ({}, {"args": {"ignore_data_skip": True}}):
        [got] = training.results({**job, "resume": True, **more})
        assert "EpochTrainer" in got["says"]


def test_accelerate_does_not_continue_without_a_state(script: Any) -> None:
    job = {"job": "prepared", "data": "epochs", "wrap": ["prepare"], "loader": "torch"}
    loop = script("use_accelerate.py", 1)
    assert loop.start({**job, "die": ["batch", 20]}) != 0
    [got] = loop.results(job)
    assert "register_for_checkpointing(loader)" in got["says"]


# What else Lightning does with loaders.


@RANKS
def test_lightning(script: Any, ranks: int) -> None:
    no_saves = {"save_every": 0}
    whole = {"trained": TWICE, "validations": [WHOLE, WHOLE]}
    part = {"least": 0, "most": 1, "total": 24 * ranks}
    rows = [
        Row({"trainer": {"num_sanity_val_steps": -1}, **no_saves}, whole),
        Row({"trainer": {"accumulate_grad_batches": 3}, "workers": 2, **no_saves}, whole),
        Row({"trainer": {"limit_val_batches": 3}, **no_saves}, {"trained": TWICE, "validations": [part] * 2}),
        Row({"trainer": {"val_check_interval": 30}, **no_saves},
            {"trained": TWICE, "validations": [WHOLE] * (8 if ranks == 1 else 4)}),
        Row({"trainer": {"fast_dev_run": True}, "job": f"dev-{ranks}"},
            {"trained": {"least": 0, "most": 1, "total": 8 * ranks}}),
        Row({"trainer": {"limit_train_batches": 21}, "max_epochs": 6 // ranks, **no_saves},
            {"trained": WHOLE}),
        Row({"loader": "torch", **no_saves}, whole),
        Row({"data": "map", **no_saves}, whole),
        Row({"data": "map", "loader": "torch", **no_saves}, whole),
        Row({"trainer": {"overfit_batches": 2}, **no_saves}, "overfit_batches"),
    ]
    script("use_lightning.py", ranks).check(rows)


# What else Trainer does with loaders.

#: Accelerate repeats samples there, and its metrics would count them.
FILLED = "1000 is no multiple of 16: give the wrapper a MapDataset, or dispatch_batches=True"
CONFIGS: list[dict[str, Any]] = [
    {}, {"dispatch_batches": False}, {"split_batches": True}, {"even_batches": False},
]


@RANKS
def test_trainer(script: Any, ranks: int) -> None:
    only = {"only_eval": True}
    twice = {"validations": [WHOLE, WHOLE]}
    rows = [
        Row({**only, "eval": data, "args": {"accelerator_config": config}},
            FILLED if ranks == 2 and data == "whole" and config == CONFIGS[1] else twice)
        for data in ("whole", "map") for config in CONFIGS
        # Without `even_batches` Trainer itself waits for a rank that has no batch.
        if (ranks, data, config) != (2, "map", CONFIGS[3])
    ]
    rows += [Row({**only, "eval": "parts"}, twice if ranks == 1 else "rank=0, ranks=1")]
    trained = {"trained": {"least": 1, "most": 1, "total": SAMPLES}}
    for config in CONFIGS:
        case = {"plain": True, "max_epochs": 1, "args": {"accelerator_config": config}}
        rows.append(Row(case, trained if ranks == 1 else "use fletch.torch.hugging_face.EpochTrainer"))
    if ranks == 1:
        # On two ranks only the first one has workers, and the other one would wait for it in the next case.
        rows.append(Row({"plain": True, "max_epochs": 1, "workers": 2}, trained))
    again = {"job": f"again-{ranks}", "max_epochs": 1}
    script("use_trainer.py", ranks).check([*rows, Row(again, {})])
    script("use_trainer.py", ranks).check([Row(again, "give resume_from_checkpoint=True to continue")])


# What else Accelerate and torchdata do with loaders.


@RANKS
def test_accelerate(script: Any, ranks: int) -> None:
    whole, rest = {"counted": WHOLE}, {"counted": {"least": 0, "most": 1, "total": SAMPLES - 3 * 8 * ranks}}
    own = "do not give it to prepare"
    rows = [
        Row({"data": "epochs", "wrap": ["prepare"]}, own),
        Row({"data": "epochs", "wrap": ["prepare"], "config": {"use_stateful_dataloader": True}},
            "give the EpochDataset to fletch.torch.DataLoader"),
        Row({"data": "epochs", "wrap": ["skip"]}, r"save dataset.state_dict\(\)"),
        Row({"data": "epochs", "wrap": ["skip0"]}, "whose batches only that loader makes"),
        Row({"data": "epochs", "wrap": ["prepare", "skip"], "loader": "torch"}, "EpochTrainer"),
        Row({"data": "epochs", "wrap": ["stateful"]}, "give the EpochDataset to fletch.torch.DataLoader"),
        Row({"data": "epochs", "wrap": ["stateful"], "workers": 2}, "fletch.torch.DataLoader"),
        Row({"data": "passes", "wrap": ["stateful"]}, whole),
        Row({"data": "passes", "wrap": ["stateful"], "workers": 2}, whole),
        Row({"data": "passes", "wrap": ["skip"]}, rest),
    ]
    for config in ({}, {"dispatch_batches": False}, {"split_batches": True}, {"even_batches": False}):
        torchs = {"wrap": ["prepare"], "loader": "torch", "config": config}
        rows.append(Row({"data": "epochs", **torchs}, whole if ranks == 1 else own))
        rows.append(Row({"data": "passes", **torchs}, whole if ranks == 1 else "rank=0, ranks=1"))
        for loader in ("torch", "fletch"):
            for workers in (0, 2):
                # Without `even_batches` a collective in each step would wait for a rank that has no batch.
                case = {**torchs, "loader": loader, "workers": workers}
                case["metrics"] = "even_batches" not in config
                gives = FILLED if ranks == 2 and config == {"dispatch_batches": False} else whole
                rows.append(Row({"data": "whole", **case, "metrics": True}, gives))
                rows.append(Row({"data": "map", **case}, whole))
    if ranks == 1:
        # On two ranks only the first one has workers, and the other one would wait for it in the next case.
        rows.append(Row({"data": "epochs", "wrap": ["prepare"], "workers": 2}, own))
        rows.append(Row({"data": "map", "wrap": ["skip"]}, rest))
        rows.append(Row({"data": "map", "wrap": ["stateful"]}, whole))
    else:
        # On every process an epoch of one rank, which would be divided.
        rows.append(Row({"data": "epochs-whole", "wrap": ["prepare"], "loader": "torch"}, own))
    script("use_accelerate.py", ranks).check(rows)


def test_datasets(script: Any) -> None:
    whole = {"counted": WHOLE}
    rows = [Row({"data": data, "stream": stream}, whole)
            for data in ("passes", "map", "epochs") for stream in (True, False)]
    script("use_datasets.py", 1).check(rows)
