"""Fixtures: a real server and real datasets, made by the built programs.

`FLETCH_BIN` is the directory of the programs. A server and its datasets use one scratch directory, which is
removed at the end. The server is ended by its process id.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Callable, Iterator

import pytest

import fletch

BIN = Path(os.environ["FLETCH_BIN"])
WITHIN = 60.0
# A shell lets what it runs in the background ignore Ctrl-C, and so would the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def until(what: str, holds: Callable[[], bool], within: float = WITHIN) -> None:
    """Waits for a condition."""
    end = time.monotonic() + within
    while not holds():
        assert time.monotonic() < end, f"not within {within} s: {what}"
        time.sleep(0.02)


class Server:
    """A running `fletch-server`."""

    def __init__(self, scratch: Path, *more: str) -> None:
        self.scratch, self.more = scratch, more
        self.socket = scratch / "s.sock"
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.start()

    def start(self, listen: str = "127.0.0.1:0") -> None:
        ready = self.scratch / "ready"
        ready.unlink(missing_ok=True)
        clean = {k: v for k, v in os.environ.items() if not k.startswith("FLETCH_")}
        with open(self.scratch / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                [BIN / "fletch-server", "--listen", listen, "--socket", self.socket]
                + ["--cache-dir", self.scratch / "cache", "--state-dir", self.scratch / "state"]
                + ["--cache-size", "256MiB", "--ready-file", ready]
                + ([] if "--memory" in self.more else ["--memory", "256MiB"])
                + [*self.more],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=clean,
            )
        process = self.process

        def is_ready() -> bool:
            assert process.poll() is None, (self.scratch / "server.log").read_text()
            return ready.exists() and ready.read_text().startswith("http://")

        until("the server is ready", is_ready)
        self.url = ready.read_text().strip()

    def lives(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(WITHIN)

    def stop(self) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.kill()

    def publish(self, name: str, tree: Path, *more: str) -> str:
        """Indexes a tree with `more` arguments, and registers it. Returns its root."""
        tables = self.scratch / f"tables-{name}"
        state = self.scratch / f"index-{name}"
        index = [BIN / "fletch", "index", tree, "--to", tables, "--state-dir", state, "--quiet", *more]
        root = subprocess.run(index, check=True, capture_output=True, text=True).stdout.strip()
        self.register(name, tree, tables)
        return root

    def register(self, name: str, tree: Path, tables: Path) -> None:
        register = [BIN / "fletch", "register", name, tree, "--tables", tables, "--server", self.url]
        subprocess.run(register, check=True, capture_output=True)


def scratch_dir() -> Path:
    # Short: the path of a unix socket has at most 107 bytes.
    return Path(tempfile.mkdtemp(prefix="fletch-py-"))


@contextmanager
def serving(*more: str) -> Iterator[Server]:
    """A server that is ended, with its directories, at the end of the block."""
    scratch = scratch_dir()
    server = Server(scratch, *more)
    yield server
    server.stop()
    shutil.rmtree(scratch)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server that the test may kill. Its leases expire soon after their holders end."""
    with serving("--limits-lease-ttl", "10s") as server:
        yield server


@pytest.fixture(params=["tcp", "unix"])
def client(request: pytest.FixtureRequest, server: Server) -> fletch.Client:
    at = server.url if request.param == "tcp" else f"unix:{server.socket}"
    return fletch.Client(at, job="pytest")


@pytest.fixture(scope="session")
def files(server: Server) -> Path:
    """The dataset `files`: small, empty and large files, files with odd names, a link, an empty directory."""
    tree = server.scratch / "tree-files"
    rng = random.Random(7)
    for i in range(600):
        path = tree / f"{'abc'[i % 3]}" / f"{i:03}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(rng.randrange(1, 6000)))
    (tree / "empty").write_bytes(b"")
    (tree / "middle.bin").write_bytes(rng.randbytes(3_000_000))
    (tree / "large.bin").write_bytes(rng.randbytes(35_000_001))
    (tree / "odd é #1?.bin").write_bytes(b"odd")
    (tree / "link").symlink_to("a/000.bin")
    (tree / "void").mkdir()
    server.publish("files", tree)
    return tree


@pytest.fixture(scope="session")
def shards(server: Server) -> Path:
    """The dataset `shards`: two tar shards with four samples of a .jpg and a .cls each, and a README."""
    tree = server.scratch / "tree-shards"
    tree.mkdir()
    rng = random.Random(8)
    for s in range(2):
        with tarfile.open(tree / f"{s}.tar", "w") as tar:
            for i in range(4):
                for ext, body in (("cls", str(i).encode()), ("jpg", rng.randbytes(9000))):
                    path = server.scratch / "member"
                    path.write_bytes(body)
                    tar.add(path, arcname=f"{s}-{i}.{ext}")
    (tree / "README.md").write_text("two shards")
    server.publish("shards", tree)
    return tree


@pytest.fixture(scope="session")
def images(server: Server) -> Path:
    """The dataset `images`: an image folder with nested folders, links, and files that are not images."""
    from PIL import Image

    tree = server.scratch / "tree-images"
    rng = random.Random(9)
    for i in range(48):
        name = ["cat", "dog", "emu"][i % 3]
        path = tree / "train" / name / ("deep/er" if i % 5 == 0 else "") / f"{i}.{['png', 'JPG'][i % 2]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        size = (8 + i % 3, 9)
        image = Image.frombytes("RGB", size, rng.randbytes(size[0] * size[1] * 3))
        image.save(path, format=["PNG", "JPEG"][i % 2])
    (tree / "train" / "notes.txt").write_text("no class")
    (tree / "train" / "cat" / "README").write_text("no image")
    (tree / "train" / "cat" / "again.png").symlink_to("../dog/16.png")
    (tree / "train" / "dog" / "more").symlink_to("../emu/deep")
    server.publish("images", tree)
    return tree


def end_with_children(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that still runs, and everything that it started.

    Torchrun starts its ranks in sessions of their own, so a signal to its process group leaves them alive.
    """
    if process.poll() is None:
        pids = [process.pid, *_children_of(process.pid)]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(20)


def _children_of(parent: int) -> list[int]:
    """The processes that a process started, and those that they started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The process's name, in parentheses, may contain spaces.
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                child = int(stat.parent.name)
                found += [child, *_children_of(child)]
    return found


def in_child(holds: Callable[[], bool]) -> None:
    """Forks, checks in the child that ``holds`` returns true, and waits for the child."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if holds() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def sockets_of(pid: int | str = "self") -> set[str]:
    """The inodes of the open sockets of a process."""
    out = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(fd)
        except FileNotFoundError:
            continue
        if target.startswith("socket:"):
            out.add(target)
    return out
