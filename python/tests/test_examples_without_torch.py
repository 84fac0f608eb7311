"""The examples without PyTorch: killed in the middle of an epoch, started again, and checked.

An example whose framework is not installed skips, and says so. `make accept-without-torch` installs them.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Iterator

import pytest

import fletch
from conftest import BIN, Server, end_with_children, serving, until

EXAMPLES = Path(__file__).parent.parent / "examples"
PAGES = EXAMPLES.parent.parent / "docs" / "howto"
FILES = 480


@pytest.fixture(scope="module")
def classes() -> Iterator[Server]:
    """A server with the dataset ``classes``: 480 files in three folders."""
    with serving("--limits-lease-ttl", "5s") as server:
        rng = random.Random(5)
        for i in range(FILES):
            path = server.scratch / "classes" / "abc"[i % 3] / f"{i:03}.bin"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(rng.randbytes(rng.randrange(100, 900)))
        server.publish("classes", server.scratch / "classes")
        yield server


class Training:
    """An example in a folder of its own. What it prints is in a file."""

    def __init__(self, server: Server, folder: Path, script: str) -> None:
        self.folder, self.out = folder, folder / "out"
        self.job = script.removesuffix(".py").replace("_", "-")
        self.words = [sys.executable, EXAMPLES / script, f"unix:{server.socket}", "classes", self.job]

    def start(self) -> subprocess.Popen[bytes]:
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "RAY_DEDUP_LOGS": "0"}
        with open(self.out, "ab") as out:
            return subprocess.Popen(
                self.words, cwd=self.folder, stdout=out, stderr=out, env=env, start_new_session=True
            )

    def text(self) -> str:
        return self.out.read_text(errors="replace")

    def killed_after_a_checkpoint(self) -> None:
        process, versions = self.start(), set[int]()

        def has_saved_twice() -> bool:
            with suppress(FileNotFoundError):
                versions.add((self.folder / f"{self.job}.checkpoint").stat().st_mtime_ns)
            return len(versions) > 1

        try:
            # The first one is that before the first step. What the workers of Ray print comes too late.
            until("a checkpoint", lambda: has_saved_twice() or process.poll() is not None, 180)
            assert process.poll() is None, self.text()
        finally:
            end_with_children(process)
        self.out.unlink()

    def finished(self) -> str:
        process = self.start()
        try:
            assert process.wait(180) == 0, self.text()
        finally:
            end_with_children(process)
        return self.text()


@pytest.mark.parametrize(
    ("script", "package"),
    [
        ("train_numpy.py", "numpy"),
        ("train_jax.py", "jax"),
        ("train_tf_data.py", "tensorflow"),
        ("train_grain.py", "grain"),
    ],
)
def test_a_killed_training_continues(classes: Server, tmp_path: Path, script: str, package: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed: make accept-without-torch installs it")
    training = Training(classes, tmp_path, script)
    training.killed_after_a_checkpoint()
    said = training.finished()
    assert "continues with epoch 0" in said, said
    ends = re.findall(r"epoch (\d): (\d+) images, receipt (\w+)", said)
    assert [(epoch, receipt) for epoch, _, receipt in ends] == [("0", "agrees"), ("1", "agrees")], said
    assert ends[1][1] == str(FILES), said


def test_three_calls_read_the_same_bytes_without_a_mount(classes: Server) -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed: tests/install.sh installs it")
    program = EXAMPLES / "read_without_mount.py"
    words = [sys.executable, program, f"unix:{classes.socket}", "classes"]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    tree = classes.scratch / "classes"
    contents = b"".join(path.read_bytes() for path in sorted(tree.rglob("*.bin")))
    read = f"{FILES} reads, {len(contents)} bytes, sha256 {hashlib.sha256(contents).hexdigest()}"
    assert said.splitlines() == [f"{call}: {read}" for call in ("read_many", "read_range", "fletch://")]
    assert f"```python\n{program.read_text()}```\n" in (PAGES / "without-fuse.md").read_text()


def test_killed_workers_of_ray_continue(classes: Server, tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason="ray is not installed: make accept-without-torch installs it")
    training = Training(classes, tmp_path, "train_ray.py")
    training.killed_after_a_checkpoint()
    said = training.finished()
    assert "continues with epoch 0" in said, said
    counts = re.findall(r"epoch 1: (\d+) images of rank (\d)", said)
    assert {rank: int(count) for count, rank in counts} == {"0": FILES // 2, "1": FILES // 2}, said
    # The server has a receipt of the epoch that was cut, so each sample was consumed once.
    words = [BIN / "fletch", "receipt", "show", training.job, "0", "--server", classes.url]
    shown = subprocess.run(words, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr


def iterable(classes: Server, job: str, monkeypatch: pytest.MonkeyPatch) -> tuple[fletch.Epochs, Any]:
    """The epochs of a job in batches of five, and the example's dataset over them, of the samples' sizes."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from iterable_dataset import IterableEpochs

    client = fletch.Client(f"unix:{classes.socket}")
    epochs = fletch.Epochs(client, "classes", job=job, batch_size=5)
    return epochs, IterableEpochs(epochs, lambda batch: [sample.nbytes for sample in batch])


def sizes_of(classes: Server) -> list[int]:
    return sorted(entry.size for entry in fletch.Client(classes.url).resolve("classes").entries())


def test_an_iterable_dataset_of_torch_over_epochs(classes: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pytest.importorskip("torch.utils.data", reason="torch is not installed")
    first, dataset = iterable(classes, "iterable", monkeypatch)
    got: list[int] = []
    with first:
        assert len(dataset) == FILES // 5
        for step, batch in enumerate(data.DataLoader(dataset, batch_size=None, num_workers=0), 1):
            got += batch
            if step == 4:
                state = dataset.state_dict()
                break
    second, dataset = iterable(classes, "iterable", monkeypatch)
    with second:
        dataset.load_state_dict(state)
        got += [size for batch in data.DataLoader(dataset, batch_size=None) for size in batch]
        assert sorted(got) == sizes_of(classes) and second.stats()["receipt"] == "agrees"


def test_a_stateful_loader_saves_the_state(classes: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = "torchdata is not installed: make accept-frameworks installs it"
    loaders = pytest.importorskip("torchdata.stateful_dataloader", reason=lacks)
    first, dataset = iterable(classes, "stateful", monkeypatch)
    got: list[int] = []
    with first:
        loader = loaders.StatefulDataLoader(dataset, batch_size=None, num_workers=0)
        for step, batch in enumerate(loader, 1):
            got += batch
            if step == 4:
                state = loader.state_dict()
                break
    second, dataset = iterable(classes, "stateful", monkeypatch)
    with second:
        loader = loaders.StatefulDataLoader(dataset, batch_size=None, num_workers=0)
        loader.load_state_dict(state)
        got += [size for batch in loader for size in batch]
        assert sorted(got) == sizes_of(classes) and second.stats()["receipt"] == "agrees"


@pytest.mark.parametrize(
    "example", ["train_numpy.py", "train_jax.py", "train_tf_data.py", "train_grain.py", "train_ray.py"]
    + ["iterable_dataset.py"]
)
def test_the_page_shows_the_examples(example: str) -> None:
    program = (EXAMPLES / example).read_text()
    shown = re.findall(r"```python\n(.*?)```\n", (PAGES / "without-torch.md").read_text(), re.DOTALL)
    assert any(block in program for block in shown), example
    assert all(any(block in (EXAMPLES / one).read_text() for one in os.listdir(EXAMPLES)) for block in shown)
