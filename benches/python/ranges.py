"""Measures random reads of one large file through a mount, and what they cost at the origin.

    sudo FLETCH_BIN=target/release python3 benches/python/ranges.py [--json FILE] [--check] [--cold]

Needs root, FUSE and fio. The server is on this machine and has the whole file. In each round a fresh mount
and a fresh `bare-mount` (a daemon that serves one buffer from memory, hashes nothing and asks nobody) read
the same number of blocks. So does the file itself, which is in the page cache, and a `bare-mount` that has
the kernel read it (passthrough, Linux 6.9). With `--cold` nothing is in the page cache, and the disk counts.
The first table has the medians, and the processor time of server and mount for a gigabyte.

The second table is of a server that keeps nothing: windows at random places of the file, and the bytes that
the server read at the origin for each byte that was asked for. `places` has five windows that overlap in each
of 200 places.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BIN = Path(os.environ.get("FLETCH_BIN", "target/release")).resolve()
MIB = 1 << 20
#: Name, block bytes, jobs, blocks of each job, how fio reads, the least part of the bare daemon's rate.
READS = [
    ("random 4 KiB", 4096, 1, 20_000, ("randread", "psync"), 0.25),
    ("random 4 KiB", 4096, 4, 5_000, ("randread", "psync"), 0.25),
    ("random 128 KiB", 131_072, 1, 3_000, ("randread", "psync"), 0.4),
    ("random 128 KiB", 131_072, 4, 750, ("randread", "psync"), 0.4),
    ("sequential 1 MiB", MIB, 1, 1_000, ("read", "psync"), 0.0),
    ("sequential mmap", MIB, 1, 1_000, ("read", "mmap"), 0.0),
]
#: The most processor time of server and mount for a gigabyte of random reads of 4 KiB, in seconds.
CPU_MAX = 40.0
#: The most requests at the origin for the windows of `places`.
REQUESTS_MAX = 260
#: Bytes of a window, how many, and the most bytes at the origin for each byte asked.
WINDOWS = [(2_048, 1_000, 16.0), (16_384, 1_000, 3.0), (65_536, 600, 1.6), (MIB, 100, 1.1)]
CLOCK = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK


def wait_for(what: str, done) -> None:
    until = time.monotonic() + 30
    while not done():
        if time.monotonic() > until:
            raise SystemExit(f"{what} did not come within 30 s")
        time.sleep(0.01)


class Bench:
    def __init__(self, scratch: Path, mib: int) -> None:
        self.scratch, self.bytes = scratch, mib * MIB
        self.tree, self.tables = scratch / "tree", scratch / "tables"
        self.tree.mkdir()
        with open(self.tree / "big.bin", "wb") as file:
            for _ in range(mib):
                file.write(os.urandom(MIB))
        self.socket = scratch / "socket"
        own = {"FLETCH_STATE_DIR": str(scratch / "state"), "FLETCH_SERVER": f"unix:{self.socket}"}
        self.environment = {**os.environ, **own, "FLETCH_SURVIVE": "false"}
        self.log = open(scratch / "log", "wb")
        self.fletch("index", self.tree, "--to", self.tables, "--quiet")

    def fletch(self, *words) -> None:
        command = [BIN / "fletch", *words]
        subprocess.run(command, env=self.environment, stdout=subprocess.DEVNULL, check=True)

    @contextmanager
    def server(self, *flags: str) -> Iterator[int]:
        usual = ["--listen", "none", "--socket", self.socket, "--state-dir", self.scratch / "state"]
        usual += ["--cache-dir", self.scratch / "cache", *flags]
        command = [BIN / "fletch-server", *usual]
        server = subprocess.Popen(command, env=self.environment, stderr=self.log)
        try:
            wait_for("the server", self.socket.exists)
            self.fletch("register", "ranges", self.tree, "--tables", self.tables)
            yield server.pid
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(30)

    @contextmanager
    def mounted(self, *command) -> Iterator[tuple[Path, int]]:
        mount = Path(tempfile.mkdtemp(dir=self.scratch, prefix="mount-"))
        words = [str(mount) if word == "DIR" else word for word in command]
        daemon = subprocess.Popen(words, env=self.environment, stderr=self.log, stdout=self.log)
        try:
            wait_for("the mount", mount.is_mount)
            yield mount, daemon.pid
        finally:
            subprocess.run(["umount", mount], check=True)
            daemon.wait(30)
            mount.rmdir()

    def of_fletch(self):
        return self.mounted(BIN / "fletch-mount", "ranges", "DIR")

    def of_bare(self, *backing: Path):
        return self.mounted(BIN / "bare-mount", "DIR", "1", str(self.bytes), *backing)

    def metric(self, begins: str) -> float:
        url = ["curl", "-sf", "--unix-socket", self.socket, "http://server/metrics"]
        text = subprocess.run(url, capture_output=True, text=True, check=True).stdout
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(begins))


def fio(file: Path, block: int, jobs: int, blocks: int, how: tuple[str, str]) -> float:
    """Returns megabytes a second."""
    pattern, engine = how
    command = ["fio", "--name=read", f"--filename={file}", f"--rw={pattern}", f"--bs={block}", "--readonly"]
    command += [f"--numjobs={jobs}", f"--io_size={block * blocks}", f"--ioengine={engine}"]
    command += ["--group_reporting", "--invalidate=0"]
    command += ["--output-format=json", "--randrepeat=0", "--allow_file_create=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return json.loads(done[done.index("{") :])["jobs"][0]["read"]["bw_bytes"] / 1e6


def rates(bench: Bench, rounds: int, is_cold: bool) -> list[dict]:
    rows = []

    def read(file: Path, *how) -> float:
        if is_cold:
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("3")
        return fio(file, *how)

    with bench.server("--memory", "512MiB", "--cache-size", "4GiB", "--cache-free-floor", "0") as server:
        with bench.of_fletch() as (mount, _):
            fio(mount / "big.bin", MIB, 1, bench.bytes // MIB, ("read", "psync"))
        for name, block, jobs, blocks, how, least in READS:
            blocks = min(blocks, bench.bytes // block)
            own, bare, passed, native, cost = [], [], [], [], []
            for _ in range(rounds):
                with bench.of_fletch() as (mount, pid):
                    before = cpu_s(server) + cpu_s(pid)
                    own.append(read(mount / "big.bin", block, jobs, blocks, how))
                    spent = cpu_s(server) + cpu_s(pid) - before
                    cost.append(spent / (block * blocks * jobs / 1e9))
                with bench.of_bare() as (mount, _):
                    bare.append(read(mount / "d00" / "f00000.jpg", block, jobs, blocks, how))
                with bench.of_bare(bench.tree / "big.bin") as (mount, _):
                    passed.append(read(mount / "d00" / "f00000.jpg", block, jobs, blocks, how))
                native.append(read(bench.tree / "big.bin", block, jobs, blocks, how))
            ratios = sorted(a / b for a, b in zip(own, bare, strict=True))
            row = {
                "read": name,
                "jobs": jobs,
                "MB/s": round(statistics.median(own), 1),
                "bare MB/s": round(statistics.median(bare), 1),
                "of bare": round(statistics.median(ratios), 2),
                "from, to": [round(ratios[0], 2), round(ratios[-1], 2)],
                "passthrough MB/s": round(statistics.median(passed), 1),
                "native MB/s": round(statistics.median(native), 1),
                "CPU s/GB": round(statistics.median(cost), 1),
            }
            row["met"] = row["of bare"] >= least and (block != 4096 or row["CPU s/GB"] <= CPU_MAX)
            rows.append(row)
            print(row, flush=True)
    return rows


def windows(bench: Bench, most: float | None, size: int, at: list[int]) -> dict:
    row = {"window": size, "windows": len(at)}
    with bench.server("--memory", "64MiB", "--cache-size", "0"), bench.of_fletch() as (mount, _):
        truth = os.open(bench.tree / "big.bin", os.O_RDONLY)
        file = os.open(mount / "big.bin", os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        for offset in at:
            if os.pread(file, size, offset) != os.pread(truth, size, offset):
                raise SystemExit(f"other bytes at {offset}")
        os.close(file)
        os.close(truth)
        read = bench.metric("fletch_origin_read_bytes_total")
        row["origin bytes / asked"] = round(read / (size * len(at)), 2)
        row["origin requests"] = round(bench.metric("fletch_origin_requests_total"))
    if most is not None:
        row |= {"at most": most, "met": row["origin bytes / asked"] <= most}
    else:
        row["met"] = row["origin requests"] <= REQUESTS_MAX
    return row


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cold", action="store_true", help="drop the page cache before each read")
    parser.add_argument("--check", action="store_true", help="fail if a row is missed")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fletch-ranges-") as scratch:
        bench, rng = Bench(Path(scratch), given.mib), random.Random(48)
        figures = {"rates": rates(bench, given.rounds, given.cold), "windows": []}
        for size, count, most in WINDOWS:
            at = [rng.randrange(bench.bytes - size) for _ in range(count)]
            figures["windows"].append(windows(bench, most, size, at))
            print(figures["windows"][-1], flush=True)
        places = [rng.randrange(bench.bytes - 65_536) for _ in range(200)]
        near = [place + n * 512 for place in places for n in range(5)]
        figures["windows"].append({"places": 200, **windows(bench, None, 2_048, near)})
        print(figures["windows"][-1], flush=True)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    missed = [row for rows in figures.values() for row in rows if not row["met"]]
    if given.check and missed:
        raise SystemExit(f"missed: {missed}")


if __name__ == "__main__":
    main()
