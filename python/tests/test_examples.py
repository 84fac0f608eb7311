"""The examples that people copy: killed in the middle of an epoch, started again, and checked."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator

import pytest
from PIL import Image

import framework_scripts
from conftest import BIN, Server, end_with_children, serving, until
from framework_scripts import TWICE, Script, publish_numbered

EXAMPLES = Path(__file__).parent.parent / "examples"
#: Frameworks with the same calls, for an interpreter that lacks them.
STAND_INS = Path(__file__).parent / "stand_ins"
LAUNCHER = [*framework_scripts.LAUNCHER, "--nproc_per_node=2"]
PAGES = {
    "validation.md": "evaluate.py",
    "lightning.md": "train_lightning.py",
    "hugging-face-trainer.md": "train_hugging_face.py",
    "accelerate.md": "train_accelerate.py",
}
IMAGES = 48


@pytest.fixture(scope="module")
def pictures() -> Iterator[Server]:
    """A server with a dataset of small images in three classes."""
    with serving("--limits-lease-ttl", "5s") as server:
        rng = random.Random(5)
        for i in range(IMAGES):
            image = Image.new("RGB", (24, 24), (rng.randrange(256), rng.randrange(256), rng.randrange(256)))
            path = server.scratch / "pictures" / "abc"[i % 3] / f"{i:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
        server.publish("pictures", server.scratch / "pictures")
        publish_numbered(server)
        yield server


class Training:
    """A training script in a folder of its own. What it prints is in a file."""

    def __init__(self, server: Server, folder: Path, job: str, launcher: list[str], script: str) -> None:
        self.out = folder / "out"
        self.folder, self.job = folder, job
        self.words = [sys.executable, "-W", "ignore", *launcher, str(EXAMPLES / script)]
        self.words += [f"unix:{server.socket}", "pictures", job]

    def start(self) -> subprocess.Popen[bytes]:
        # A session of its own, so that everything it starts can be ended together.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "ACCELERATE_USE_CPU": "true"}
        lacks = [name for name in ("lightning", "transformers") if importlib.util.find_spec(name) is None]
        if lacks:
            env["PYTHONPATH"] = os.pathsep.join([str(STAND_INS), env.get("PYTHONPATH", "")])
        with open(self.out, "ab") as out:
            return subprocess.Popen(
                self.words, cwd=self.folder, stdout=out, stderr=out, env=env, start_new_session=True
            )

    def text(self) -> str:
        return self.out.read_text()

    def killed_after_a_checkpoint(self) -> None:
        process = self.start()
        try:
            until("a checkpoint", lambda: "checkpoint after" in self.text() or process.poll() is not None)
            assert process.poll() is None, self.text()
        finally:
            end_with_children(process)
        self.out.unlink()

    def finished(self) -> str:
        process = self.start()
        assert process.wait(120) == 0, self.text()
        return self.text()


@pytest.mark.parametrize("script", ["train_resume.py", "train_hooks.py", "train_accelerate.py"])
def test_a_killed_training_continues(pictures: Server, tmp_path: Path, script: str) -> None:
    if script == "train_accelerate.py":
        pytest.importorskip("accelerate", reason="tests/install.sh installs it")
    training = Training(pictures, tmp_path, script.removesuffix(".py"), [], script)
    training.killed_after_a_checkpoint()
    said = training.finished()
    assert "continues with epoch 0" in said, said
    ends = re.findall(r"epoch (\d): (\d+) images, receipt (\w+)", said)
    assert [(epoch, receipt) for epoch, _, receipt in ends] == [("0", "agrees"), ("1", "agrees")], said
    assert ends[1][1] == str(IMAGES), said


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_evaluation_has_every_image_once(pictures: Server, tmp_path: Path, ranks: int) -> None:
    training = Training(pictures, tmp_path, "", [] if ranks == 1 else LAUNCHER, "evaluate.py")
    training.words.pop()
    said = training.finished()
    assert re.search(rf"{IMAGES} images of 3 classes, \d+ right, 0 skipped", said), said


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_its_example(page: str) -> None:
    shown = (EXAMPLES.parent.parent / "docs" / "howto" / page).read_text()
    assert f"```python\n{(EXAMPLES / PAGES[page]).read_text()}```\n" in shown


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("script", ["train_lightning.py", "train_hugging_face.py", "train_accelerate.py"])
def test_a_killed_training_of_a_framework_continues(
    pictures: Server, tmp_path: Path, script: str, ranks: int
) -> None:
    if script == "train_accelerate.py":
        pytest.importorskip("accelerate", reason="tests/install.sh installs it")
    job = f"{script.removesuffix('.py')}-{ranks}".replace("_", "-")
    training = Training(pictures, tmp_path, job, [] if ranks == 1 else LAUNCHER, script)
    training.killed_after_a_checkpoint()
    said = training.finished()
    ended = re.search(r"epoch 1: (\d+) images, receipt (\w+)", said)
    assert ended is not None and int(ended[1]) * ranks == IMAGES, said
    assert ended[2] == ("agrees" if ranks == 1 else "None"), said
    # The latest validation: by each rank its share, or by all of them together.
    shares = {rank: int(count) for rank, count in re.findall(r"rank (\d) validated (\d+) images", said)}
    whole = re.findall(r"evaluated (\d+) images", said)
    assert set(whole) == {str(IMAGES)} if whole else sum(shares.values()) == IMAGES, said
    assert f"rank {ranks}" not in said


def test_a_killed_training_of_a_framework_over_epochs_continues(pictures: Server, tmp_path: Path) -> None:
    training = Training(pictures, tmp_path, "trainer-over-epochs", [], "train_hugging_face_epochs.py")
    training.killed_after_a_checkpoint()
    said = training.finished()
    # The kill may come as late as in epoch 1.
    continued = re.search(r"continues with epoch ([01]) from trainer-over-epochs/checkpoint-", said)
    assert continued is not None, said
    ends = re.findall(r"epoch (\d): \d+ images, receipt (\w+)", said)
    assert ends == [(str(epoch), "agrees") for epoch in range(int(continued[1]), 2)], said
    program = (EXAMPLES / "train_hugging_face_epochs.py").read_text()
    shown = (EXAMPLES.parent.parent / "docs" / "howto" / "hugging-face-trainer.md").read_text()
    [_, part] = re.findall(r"```python\n(.*?)```\n", shown, re.DOTALL)
    assert part in program


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_training_that_is_killed_in_a_validation_continues(
    pictures: Server, tmp_path: Path, ranks: int
) -> None:
    # The calls of Lightning, in every interpreter by the stand-in.
    fit = Script(pictures, tmp_path, "use_lightning.py", ranks, [], (STAND_INS,))
    kills: list[list[Any]] = [["sanity", 2], ["validation", 20], ["validation", 3]]
    if ranks == 2:
        kills = [["validation", 20], ["validation", 3, 1]]
    got = fit.is_killed_and_finishes(f"killed-in-validation-{ranks}", kills, 2)
    assert got["trained"] == TWICE


def test_a_training_that_saves_after_each_epoch_continues(pictures: Server, tmp_path: Path) -> None:
    # Lightning does not load the loader's state from a checkpoint of the end of an epoch.
    fit = Script(pictures, tmp_path, "use_lightning.py", 1, [], (STAND_INS,))
    got = fit.is_killed_and_finishes("saves-after-each-epoch", [["step", 150]], 2, save_every="epoch")
    assert got["trained"] == TWICE


def rank_of(job: str, rank: int) -> int | None:
    """Returns the process of a rank of a job."""
    for process in Path("/proc").iterdir():
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        # Workers of the loader have the same words; the rank is a child of torchrun.
        parent = process / "stat"
        if job.encode() in words and f"RANK={rank}".encode() in variables:
            above = parent.read_text().rsplit(")", 1)[1].split()[1]
            if b"torch.distributed.run" in Path(f"/proc/{above}/cmdline").read_bytes():
                return int(process.name)
    return None


def test_a_lost_rank_is_started_again_in_mid_epoch(pictures: Server, tmp_path: Path) -> None:
    launcher = [*LAUNCHER, "--max_restarts=3"]
    training = Training(pictures, tmp_path, "two-ranks", launcher, "train_torchrun.py")
    process = training.start()
    try:
        until("a checkpoint", lambda: "checkpoint after" in training.text() or process.poll() is not None)
        lost = rank_of("two-ranks", 1)
        assert lost is not None, training.text()
        os.kill(lost, signal.SIGKILL)
        assert process.wait(120) == 0, training.text()
    finally:
        end_with_children(process)
    said = training.text()
    for rank in (0, 1):
        assert f"rank {rank} continues with epoch 0" in said, said
        assert f"rank {rank}, epoch 0: finished" in said, said
    logs = [str(tmp_path / f"two-ranks-{rank}.log") for rank in (0, 1)]
    verify = [BIN / "fletch", "receipt", "verify", *logs, "--job", "two-ranks", "--epoch", "0"]
    checked = subprocess.run(verify + ["--server", pictures.url], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
