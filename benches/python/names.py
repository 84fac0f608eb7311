"""Measures what a dataset costs by the number of its names, and how each cost grows.

    sudo FLETCH_BIN=target/release python3 benches/python/names.py [--names 10000,100000,1000000]
        [--generated N,...] [--reads 20000] [--files DIR] [--json FILE]

Every dataset has files of 16 bytes, a thousand in a directory, below DIR (/dev/shm by default, about 5 KB of
memory for each file). For each size: an index of the files, another one of the same files with the first as
its parent, a mount, random reads through it, and `find`. The server is reached over its unix socket.

A generated dataset has the tables and the chunks of a pack of such files, and no files. (The example
`generate` of `fletch-tables` writes it.) So ten million names fit on a small disk. In the place of the index
it measures how long the server works on the samples after the dataset was registered. Then a job over all of
them: a new one, its first batch, and both again by a server that was started again.

At last files of the smallest and the largest dataset are read in turns, 500 at a time, through new mounts,
and none twice: the kernel answers for what it has seen. The server has their bytes in memory, because they
were read once before, and one file of each directory was read. So the time to open and read a file must not
depend on how many there are.

A cost that grows as N^e has the exponent e; it is fitted to
the sizes by least squares of the logarithms.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

BIN = Path(os.environ.get("FLETCH_BIN", "target/release")).resolve()
IN_A_DIRECTORY = 1000
IN_TURN = 500


def path_of(number: int) -> str:
    return f"{number // IN_A_DIRECTORY:06d}/{number:09d}.bin"


def content_of(number: int) -> bytes:
    return b"%016d" % number


def make_files(tree: Path, names: int) -> None:
    for number in range(names):
        path = tree / path_of(number)
        if number % IN_A_DIRECTORY == 0:
            path.parent.mkdir(parents=True)
        path.write_bytes(content_of(number))


def anonymous_mib(pid: int) -> int:
    """Returns the memory of a process that no file backs, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) // 1024
    raise ValueError("the kernel tells no RssAnon")


def peak_mib(pid: int) -> int:
    """Returns the most memory that a process had, with the pages of its program and of files, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) // 1024
    raise ValueError("the kernel tells no VmHWM")


def disk_mib(directory: Path) -> int:
    if not directory.exists():
        return 0
    return int(subprocess.check_output(["du", "-sm", directory]).split()[0])


class Stage:
    """One dataset, its server and its mount."""

    def __init__(self, names: int, tree: Path, scratch: Path, generated: bool = False) -> None:
        self.names, self.tree, self.scratch, self.generated = names, tree, scratch, generated
        self.tables, self.cache, self.at = scratch / "tables", scratch / "cache", scratch / "mount"
        self.socket = scratch / "server.sock"
        self.environment = {
            **os.environ,
            "FLETCH_STATE_DIR": str(scratch / "state"),
            "FLETCH_SERVER": f"unix:{self.socket}",
            "XDG_RUNTIME_DIR": str(scratch),
            # The process that is started serves the mount itself, and is not its keeper.
            "FLETCH_SURVIVE": "false",
        }
        self.figures: dict[str, float] = {"names": names}
        self.server: subprocess.Popen[bytes] | None = None
        self.mounted: subprocess.Popen[bytes] | None = None

    def fletch(self, *arguments: str | Path) -> None:
        command = [BIN / "fletch", *arguments]
        subprocess.run(command, env=self.environment, check=True, stdout=subprocess.DEVNULL)

    def index(self, row: str, *more: str) -> None:
        command = [BIN / "fletch", "index", self.tree, "--to", self.tables, "--quiet", *more]
        begin = time.perf_counter()
        child = subprocess.Popen(command, env=self.environment, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = status
        if status != 0:
            raise RuntimeError(f"{command} failed")
        self.figures[f"{row}, s"] = time.perf_counter() - begin
        self.figures[f"{row}, MiB"] = used.ru_maxrss // 1024

    def start(self) -> None:
        flags = ["--listen", "none", "--socket", self.socket, "--state-dir", self.scratch / "state"]
        flags += ["--cache-dir", self.cache / "server", "--cache-size", "0"]
        log = open(self.scratch / "server.log", "wb")
        self.server = subprocess.Popen([BIN / "fletch-server", *flags], env=self.environment, stderr=log)
        while not self.socket.exists():
            time.sleep(0.01)

    def register(self) -> None:
        self.fletch("register", "names", self.tree, "--tables", self.tables)

    def stop(self) -> None:
        if self.server is not None:
            self.server.send_signal(signal.SIGTERM)
            self.server.wait(60)
            self.server = None
            self.socket.unlink(missing_ok=True)

    def post(self, path: str, body: dict[str, object], method: str = "POST") -> bytes:
        """Sends a request to the server. Returns the answer."""
        connection = http.client.HTTPConnection("localhost", timeout=600)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(self.socket))
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        got = answer.read()
        assert answer.status < 300, f"{method} {path}: {answer.status} {got[:500]!r}"
        return got

    def wait_until_prepared(self) -> None:
        """Waits until the server, which was just told of the dataset, has worked out its samples."""
        begin = time.perf_counter()
        while "samples are prepared" not in (self.scratch / "server.log").read_text():
            time.sleep(0.05)
        self.figures["samples prepared after registering, s"] = time.perf_counter() - begin

    def job(self, name: str, row: str) -> None:
        """Declares a job over all samples, and gets its first batch and its state."""
        world = {"ranks": 8, "batch": 256, "tail": "drop"}
        begin = time.perf_counter()
        job = json.loads(self.post("/v1/jobs", {"name": name, "dataset": "names", "world": world}))
        self.figures[f"{row}: declare, s"] = time.perf_counter() - begin
        begin = time.perf_counter()
        epoch = f"/v1/jobs/{job['id']}/epochs/0"
        batch = self.post(f"{epoch}/leases", {"rank": 0, "sequence": 1, "want": 256})
        self.figures[f"{row}: first batch, s"] = time.perf_counter() - begin
        assert len(batch) > 256 * 16, f"a batch of {len(batch)} bytes"
        self.figures[f"{row}: state, MB"] = len(self.post(f"{epoch}/state", {}, "GET")) / 1e6
        if self.server is not None:
            self.figures[f"{row}: server, anonymous MiB"] = anonymous_mib(self.server.pid)
            self.figures[f"{row}: server, peak MiB"] = peak_mib(self.server.pid)

    def mount(self, row: str | None = None) -> None:
        self.at.mkdir(exist_ok=True)
        begin = time.perf_counter()
        flags = ["--cache-dir", self.cache / "mount"]
        log = open(self.scratch / "mount.log", "ab")
        command = [BIN / "fletch-mount", "names", self.at, *flags]
        self.mounted = subprocess.Popen(command, env=self.environment, stderr=log, stdout=log)
        while not self.at.is_mount():
            if self.mounted.poll() is not None:
                raise RuntimeError((self.scratch / "mount.log").read_text())
            time.sleep(0.005)
        if row:
            self.figures[f"{row}, s"] = time.perf_counter() - begin

    def unmount(self) -> None:
        if self.mounted is not None:
            subprocess.run(["umount", self.at], check=True)
            self.mounted.wait(30)
            self.mounted = None

    def read(self, numbers: list[int]) -> list[float]:
        """Opens and reads files. Returns the time of each, in seconds."""
        times = []
        for number in numbers:
            path = f"{self.at}/{path_of(number)}"
            begin = time.perf_counter()
            file = os.open(path, os.O_RDONLY)
            got = os.read(file, 64)
            os.close(file)
            times.append(time.perf_counter() - begin)
            assert got == content_of(number), f"{path} has {got!r}"
        return times

    def find(self, row: str) -> None:
        begin = time.perf_counter()
        found = subprocess.check_output(["find", self.at, "-type", "f", "-printf", "."])
        self.figures[f"{row}, s"] = time.perf_counter() - begin
        assert len(found) == self.names, f"find sees {len(found)} of {self.names} files"

    def note_memory(self) -> None:
        if self.mounted is None or self.server is None:
            raise RuntimeError("nothing runs")
        self.figures["mount, anonymous MiB"] = anonymous_mib(self.mounted.pid)
        self.figures["server, anonymous MiB"] = anonymous_mib(self.server.pid)
        self.figures["tables of the mount on disk, MiB"] = disk_mib(self.cache / "mount")
        self.figures["tables of the server on disk, MiB"] = disk_mib(self.cache / "server")

    def some(self, count: int, rng: random.Random) -> list[int]:
        """Returns different files in random order: as many, or all."""
        return rng.sample(range(self.names), min(count, self.names))

    def end(self) -> None:
        try:
            self.unmount()
        finally:
            self.stop()


def p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100)[98]


def measure(stage: Stage, reads: int, rng: random.Random) -> None:
    if stage.generated:
        subprocess.run([BIN / "examples" / "generate", stage.tables, str(stage.names)], check=True)
        stage.start()
        stage.register()
        stage.wait_until_prepared()
        stage.job("first", "first job")
        stage.stop()
        stage.start()
        stage.job("second", "job of a later server")
        stage.stop()
    else:
        stage.index("index")
        stage.index("index, nothing changed", "--parent", "auto")
    stage.start()
    stage.register()
    stage.mount("first mount")
    stage.read(stage.some(reads, rng))
    stage.note_memory()
    stage.unmount()
    stage.mount("second mount")
    stage.find("find")
    stage.find("find again")
    times = stage.read(stage.some(reads, rng))
    stage.figures["open and read, mean ms"] = statistics.mean(times) * 1e3
    stage.figures["open and read, p99 ms"] = p99(times) * 1e3


def in_turns(small: Stage, large: Stage, reads: int, rng: random.Random) -> dict[str, float]:
    times: dict[int, list[float]] = {small.names: [], large.names: []}
    count = min(reads, small.names)
    chosen = {stage.names: stage.some(count, rng) for stage in (small, large)}
    for stage in (small, large):
        stage.read(chosen[stage.names])
        stage.unmount()
        stage.mount()
        stage.read(list(range(0, stage.names, IN_A_DIRECTORY)))
    for first in range(0, count, IN_TURN):
        for stage in (small, large):
            times[stage.names] += stage.read(chosen[stage.names][first : first + IN_TURN])
    few, many = times[small.names], times[large.names]
    return {
        "mean": statistics.mean(many) / statistics.mean(few),
        "p99": p99(many) / p99(few),
        f"mean ms at {small.names}": statistics.mean(few) * 1e3,
        f"mean ms at {large.names}": statistics.mean(many) * 1e3,
    }


def exponent(points: list[tuple[float, float]]) -> float:
    logs = [(math.log(x), math.log(max(y, 1e-6))) for x, y in points]
    return statistics.linear_regression(*zip(*logs)).slope if len(logs) > 1 else math.nan


def show(stages: list[Stage], ratios: dict[str, dict[str, float]]) -> None:
    for generated in (False, True):
        same = [stage for stage in stages if stage.generated == generated]
        if same:
            show_costs(same)
    for kind, rows in ratios.items():
        for row, ratio in rows.items():
            print(f"in turns, {kind}, {row}: {ratio:.3g}")


def show_costs(stages: list[Stage]) -> None:
    print("| cost | " + " | ".join(f"{stage.names:,} names" for stage in stages) + " | exponent |")
    print("|---|" + "---|" * (len(stages) + 1))
    for row in stages[0].figures:
        if row != "names":
            cells = [stage.figures[row] for stage in stages]
            grows = exponent([(stage.names, stage.figures[row]) for stage in stages])
            print(f"| {row} | " + " | ".join(f"{cell:.3g}" for cell in cells) + f" | {grows:.2f} |")


def sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",") if size]


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--names", default="10000,100000,1000000", help="the sizes, ascending")
    parser.add_argument("--generated", default="", help="the sizes of generated datasets, ascending")
    parser.add_argument("--reads", type=int, default=20_000, help="random reads of each dataset")
    parser.add_argument("--files", type=Path, default=Path("/dev/shm"), help="where the files lie")
    parser.add_argument("--json", type=Path, help="where the raw figures go")
    options = parser.parse_args()
    rng, stages = random.Random(11), []
    scratch = Path(tempfile.mkdtemp(prefix="fletch-names-"))
    files = Path(tempfile.mkdtemp(prefix="fletch-names-", dir=options.files))
    try:
        ratios = {}
        for generated, text in ((False, options.names), (True, options.generated)):
            same = []
            for names in sizes(text):
                own = scratch / f"{'generated-' if generated else ''}{names}"
                own.mkdir()
                tree = own / "tables" if generated else files / str(names)
                if not generated:
                    make_files(tree, names)
                same.append(Stage(names, tree, own, generated))
                stages.append(same[-1])
                measure(same[-1], options.reads, rng)
            if len(same) > 1:
                kind = "generated" if generated else "files"
                ratios[kind] = in_turns(same[0], same[-1], options.reads, rng)
        show(stages, ratios)
        if options.json:
            figures = {"sizes": [stage.figures for stage in stages], "in turns": ratios}
            options.json.write_text(json.dumps(figures, indent=2) + "\n")
    finally:
        for stage in stages:
            stage.end()
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(files, ignore_errors=True)


if __name__ == "__main__":
    main()
