"""Trainings and evaluations with the frameworks themselves: exactly once and whole, or an error with a remedy.

`make accept-frameworks` runs them. Each row runs a script of this folder, on one rank or under ``torchrun`` on
two. Most rows kill it once and start it again.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator

import pytest

from conftest import Server, serving

for framework in ("accelerate", "lightning", "torchdata", "transformers"):
    pytest.importorskip(framework, reason="make accept-frameworks installs it")

HERE = Path(__file__).parent
EXAMPLES = HERE.parent.parent / "examples"
SAMPLES = 1000
WHOLE = {"least": 1, "most": 1, "total": SAMPLES}
TWICE = {"least": 2, "most": 2, "total": 2 * SAMPLES}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server with 1,000 samples, whose leases expire soon after their holders end."""
    with serving("--limits-lease-ttl", "3s") as server:
        tree = server.scratch / "tree-numbered"
        tree.mkdir()
        rng = random.Random(3)
        for i in range(SAMPLES):
            (tree / f"{i:04}").write_bytes(i.to_bytes(4, "little") + rng.randbytes(rng.randrange(300)))
        server.publish("numbered", tree)
        yield server


@dataclass
class Run:
    """A script in a folder of its own, started once or more often with the same job."""

    server: Server
    folder: Path
    job: str
    script: str
    ranks: int
    said: str = field(default="")

    def start(self, **options: Any) -> int:
        """Runs the script to its end. Returns the exit status."""
        words = [sys.executable, "-W", "ignore"]
        if self.ranks > 1:
            words += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.ranks}"]
        words += [str(HERE / self.script), f"unix:{self.server.socket}", self.job, json.dumps(options)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
        out = self.folder / "out"
        with open(out, "wb") as file:
            process = subprocess.Popen(
                words, cwd=self.folder, stdout=file, stderr=file, env=env, start_new_session=True
            )
            try:
                return process.wait(240)
            finally:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                self.said = out.read_text(errors="replace")

    def killed(self, place: str, count: int, **options: Any) -> None:
        """Runs the script, which kills itself at a place."""
        assert self.start(die=[place, count], **options) != 0, self.said
        assert "SIGKILL" in self.said or "RESULT" not in self.said, self.said
        assert "Error" not in self.said.replace("ChildFailedError", ""), self.said

    def finished(self, **options: Any) -> dict[str, Any]:
        """Runs the script to its end. Returns what it prints as its result."""
        assert self.start(**options) == 0, self.said
        found = re.search(r"^RESULT (.*)$", self.said, re.MULTILINE)
        assert found is not None, self.said
        return dict(json.loads(found[1]))

    def refused(self, says: str, **options: Any) -> None:
        """Runs the script, which ends with an error of Fletch that says what to write."""
        assert self.start(**options) != 0, self.said
        errors = re.findall(r"^(?:\[rank\d\]: ?)?fletch\.errors\.Invalid: (.*)$", self.said, re.MULTILINE)
        assert errors and re.search(says, errors[0]), self.said
        assert "RESULT" not in self.said


@pytest.fixture
def run(server: Server, tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    job = re.sub(r"\W+", "-", request.node.name).strip("-")
    return lambda script, ranks: Run(server, tmp_path, job, script, ranks)


RANKS = pytest.mark.parametrize("ranks", [1, 2])
KILLS = [("step", 37, 2), ("step", 90, 0), ("sanity", 1, 0), ("validation", 20, 0)]


# Lightning.


@RANKS
@pytest.mark.parametrize(("place", "count", "workers"), KILLS)
def test_lightning_is_killed_and_continues(run: Any, ranks: int, place: str, count: int, workers: int) -> None:
    fit = run("use_lightning.py", ranks)
    fit.killed(place, count, workers=workers)
    got = fit.finished(workers=workers)
    assert got["trained"] == TWICE
    assert set(map(str, got["validations"])) == {str(WHOLE)} and got["validations"]


@RANKS
@pytest.mark.parametrize(
    ("settings", "passes", "each"),
    [
        ({"limit_val_batches": 3}, 2, 24), ({"val_check_interval": 20}, None, SAMPLES),
        ({"num_sanity_val_steps": -1}, 2, SAMPLES), ({"limit_val_batches": 0.5}, 2, None),
        ({"gradient_clip_val": 1.0, "accumulate_grad_batches": 3}, 2, SAMPLES),
    ],
)
def test_lightning_limits_validation(
    run: Any, ranks: int, settings: Any, passes: int | None, each: int | None
) -> None:
    got = run("use_lightning.py", ranks).finished(trainer=settings, save_every=0)
    assert got["trained"] == TWICE
    sizes = {one["total"] for one in got["validations"]}
    assert len(sizes) == 1 and all(one["most"] == 1 for one in got["validations"])
    assert each is None or sizes == {each * (ranks if each < SAMPLES else 1)}
    assert len(got["validations"]) == passes if passes else len(got["validations"]) > 2


def test_lightning_runs_one_batch_and_then_all(run: Any) -> None:
    fit = run("use_lightning.py", 1)
    assert fit.finished(trainer={"fast_dev_run": True}, save_every=0)["trained"]["total"] == 8
    rest = fit.finished(max_epochs=1, save_every=0)
    # The job goes on after that batch, and the validation is whole.
    assert rest["trained"] == {"least": 0, "most": 1, "total": SAMPLES - 8}
    assert rest["validations"] == [WHOLE]


def test_lightning_cuts_epochs(run: Any) -> None:
    got = run("use_lightning.py", 1).finished(trainer={"limit_train_batches": 25}, max_epochs=5, save_every=0)
    assert got["trained"] == WHOLE and got["steps"] == 125


@RANKS
def test_lightning_divides_a_dataset_by_index(run: Any, ranks: int) -> None:
    got = run("use_lightning.py", ranks).finished(data="map", save_every=0)
    assert got["trained"] == TWICE


@RANKS
def test_a_checkpoint_of_lightning_without_a_state_is_refused(run: Any, ranks: int) -> None:
    fit = run("use_lightning.py", ranks)
    fit.killed("step", 37, loader="torch")
    fit.refused("checkpoint without a state .* give it fletch.torch.DataLoader", loader="torch")


@RANKS
def test_torchs_loader_in_lightning(run: Any, ranks: int) -> None:
    assert run("use_lightning.py", ranks).finished(loader="torch", save_every=0)["trained"] == TWICE


# Hugging Face's Trainer.


@RANKS
@pytest.mark.parametrize(("place", "count", "workers"), KILLS[:2] + [("validation", 20, 0), ("step", 3, 0)])
def test_epoch_trainer_is_killed_and_continues(
    run: Any, ranks: int, place: str, count: int, workers: int
) -> None:
    settings = {"save_every": 10, "workers": workers, "eval": "whole", "resume": True}
    training = run("use_trainer.py", ranks)
    training.killed(place, count, **settings)
    got = training.finished(**settings)
    assert got["trained"] == TWICE
    assert got["validations"] == [WHOLE] * len(got["validations"]) and got["validations"]
    assert got["global_step"] == 2 * -(-SAMPLES // (8 * ranks))


def test_epoch_trainer_accumulates(run: Any) -> None:
    settings = {"save_every": 5, "resume": True, "args": {"gradient_accumulation_steps": 3}}
    training = run("use_trainer.py", 2)
    training.killed("step", 31, **settings)
    assert training.finished(**settings)["trained"] == TWICE


def test_a_new_model_does_not_continue_a_job(run: Any) -> None:
    training = run("use_trainer.py", 1)
    training.killed("step", 12, save_every=10)
    training.refused("give resume_from_checkpoint=True to continue", save_every=10)
    assert training.finished(save_every=10, resume=True)["trained"] == TWICE


DISPATCH = [{}, {"dispatch_batches": False}, {"split_batches": True}, {"even_batches": False}]


@pytest.mark.parametrize("config", DISPATCH, ids=str)
def test_trainer_itself_is_refused_on_two_ranks(run: Any, config: Any) -> None:
    run("use_trainer.py", 2).refused("use fletch.torch.hugging_face.EpochTrainer", plain=True,
                                     args={"accelerator_config": config})


def test_trainer_itself_trains_on_one_rank_and_is_refused_at_a_restart(run: Any) -> None:
    training = run("use_trainer.py", 1)
    training.killed("step", 37, plain=True, save_every=10)
    for more in ({}, {"args": {"ignore_data_skip": True}}):
        training.refused("EpochTrainer", plain=True, save_every=10, resume=True, **more)


@pytest.mark.parametrize("workers", [0, 2])
def test_trainer_itself_trains_on_one_rank(run: Any, workers: int) -> None:
    assert run("use_trainer.py", 1).finished(plain=True, workers=workers)["trained"] == TWICE


@RANKS
@pytest.mark.parametrize("data", ["whole", "map"])
@pytest.mark.parametrize("config", DISPATCH, ids=str)
def test_trainer_evaluates_every_sample_once(run: Any, ranks: int, data: str, config: Any) -> None:
    got = run("use_trainer.py", ranks).finished(
        only_eval=True, eval=data, args={"accelerator_config": config, "eval_strategy": "no"}
    )
    assert got["validations"] == [WHOLE, WHOLE]


def test_trainer_is_not_given_a_part_to_evaluate(run: Any) -> None:
    run("use_trainer.py", 2).refused(r"rank=0, ranks=1", only_eval=True, eval="parts",
                                     args={"eval_strategy": "no"})


# Accelerate.


@RANKS
@pytest.mark.parametrize(("place", "count", "workers"), KILLS[:2] + [("validation", 20, 0)])
def test_accelerate_is_killed_and_continues(
    run: Any, ranks: int, place: str, count: int, workers: int
) -> None:
    loop = run("use_accelerate.py", ranks)
    loop.killed(place, count, workers=workers, eval=True)
    got = loop.finished(workers=workers, eval=True)
    assert got["trained"] == TWICE
    assert got["validations"] == [WHOLE] * len(got["validations"]) and got["validations"]


REFUSED = [
    ("epochs", ["prepare"], "fletch", {}, "do not give it to prepare"),
    ("epochs", ["skip"], "fletch", {}, r"save dataset.state_dict\(\)"),
    ("epochs", ["skip0"], "fletch", {}, "whose batches only that loader makes"),
    ("epochs", ["prepare", "skip"], "torch", {}, r"dataset.state_dict\(\)|EpochTrainer"),
    ("epochs", ["prepare"], "torch", {"use_stateful_dataloader": True}, "fletch.torch.DataLoader"),
    ("epochs", ["stateful"], "fletch", {}, "give the EpochDataset to fletch.torch.DataLoader"),
]


@RANKS
@pytest.mark.parametrize(("data", "wrap", "loader", "config", "says"), REFUSED)
def test_wrapped_epochs_are_refused(
    run: Any, ranks: int, data: str, wrap: list[str], loader: str, config: Any, says: str
) -> None:
    run("use_accelerate.py", ranks).refused(says, data=data, wrap=wrap, loader=loader, config=config)


@pytest.mark.parametrize(
    "config", [{"dispatch_batches": d, "split_batches": s, "even_batches": e}
               for d in (True, False) for s in (True, False) for e in (True, False)][:8:2], ids=str,
)
@pytest.mark.parametrize("data", ["epochs", "epochs-whole", "passes"])
def test_what_is_divided_already_is_not_divided_again(run: Any, data: str, config: Any) -> None:
    says = "rank=0, ranks=1" if data == "passes" else "do not give it to prepare"
    run("use_accelerate.py", 2).refused(says, data=data, wrap=["prepare"], loader="torch", config=config)


WORKS = [
    # data, wrap, loader, ranks, metrics
    ("epochs", ["prepare"], "torch", 1, False),
    ("passes", ["prepare"], "fletch", 1, False),
    ("passes", ["stateful"], "fletch", 1, False),
    ("passes", ["stateful"], "fletch", 2, False),
    ("whole", ["prepare"], "torch", 2, True),
    ("whole", ["prepare"], "fletch", 2, True),
    ("map", ["prepare"], "torch", 2, True),
    ("map", ["prepare"], "fletch", 2, True),
    ("map", ["prepare"], "fletch", 1, False),
    ("map", ["stateful"], "fletch", 1, False),
]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("data", "wrap", "loader", "ranks", "metrics"), WORKS)
def test_wrapped_loaders_have_every_sample_once(
    run: Any, data: str, wrap: list[str], loader: str, ranks: int, metrics: bool, workers: int
) -> None:
    got = run("use_accelerate.py", ranks).finished(
        data=data, wrap=wrap, loader=loader, metrics=metrics, workers=workers
    )
    assert got["counted"] == WHOLE


@pytest.mark.parametrize("data", ["passes", "map"])
def test_skipped_batches_of_a_pass_are_the_first_ones(run: Any, data: str) -> None:
    got = run("use_accelerate.py", 1).finished(data=data, wrap=["skip"], loader="fletch")
    assert got["counted"] == {"least": 0, "most": 1, "total": SAMPLES - 3 * 8}
