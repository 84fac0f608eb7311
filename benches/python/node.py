"""Times reads of batches from a server of this node: through its shared memory, and through its socket.

    FLETCH_BIN=target/release python benches/python/node.py [--rounds 5] [--seconds 1] > figures.json

A batch is 64 files in random order. The next batch is asked for while the program takes the last one, whose
bytes it looks at (their lengths). All arms run in turns in one program; a ratio is the median over rounds of
(arm / local files of the same round). Everything is warm: the files in the page cache, the chunks in the
server's memory. `local` opens and reads the same files, as a torch dataset without Fletch does.

The CPU time of client and server together, in seconds per GB, stands beside each rate.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python" / "tests"))

import fletch
from conftest import Server, scratch_dir

BATCH = 64


def cpu_of(pid: int) -> float:
    """Returns the seconds of CPU time that a process has used."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def by_fletch(version: fletch.Version, count: int) -> Callable[[float], tuple[int, int]]:
    ordinals = list(range(count))

    def run(seconds: float) -> tuple[int, int]:
        samples, size, end = 0, 0, time.perf_counter() + seconds
        pending = version.prefetch(random.sample(ordinals, BATCH))
        while time.perf_counter() < end:
            following = version.prefetch(random.sample(ordinals, BATCH))
            views = pending.views()
            size += sum(map(len, views))
            samples += len(views)
            pending = following
        pending.views()
        return samples, size

    return run


def by_files(tree: Path) -> Callable[[float], tuple[int, int]]:
    paths = sorted(str(p) for p in tree.iterdir())

    def run(seconds: float) -> tuple[int, int]:
        samples, size, end = 0, 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            for path in random.sample(paths, BATCH):
                with open(path, "rb") as file:
                    size += len(file.read())
                samples += 1
        return samples, size

    return run


def row(server: Server, tree: Path, count: int, rounds: int, seconds: float) -> dict[str, Any]:
    unix = f"unix:{server.socket}"
    clients = {
        "verify client": fletch.Client(unix, job="bench"),
        "verify server": fletch.Client(unix, job="bench", verify="server"),
        "tcp": fletch.Client(server.url, job="bench"),
    }
    arms = {name: by_fletch(client.resolve(tree.name), count) for name, client in clients.items()}
    arms["local"] = by_files(tree)
    for arm in arms.values():
        arm(seconds)
    assert server.process is not None
    pid = server.process.pid
    rates: dict[str, list[float]] = {name: [] for name in arms}
    cpus: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            cpu, begun = time.process_time() + cpu_of(pid), time.perf_counter()
            samples, size = arm(seconds)
            rates[name].append(samples / (time.perf_counter() - begun))
            cpus[name].append((time.process_time() + cpu_of(pid) - cpu) / (size / 1e9))
    return {
        name: {
            "samples_per_s": round(statistics.median(rates[name])),
            "of_local": round(statistics.median(a / b for a, b in zip(rates[name], rates["local"])), 2),
            "of_local_range": [
                round(f(a / b for a, b in zip(rates[name], rates["local"])), 2) for f in (min, max)
            ],
            "cpu_s_per_gb": round(statistics.median(cpus[name]), 2),
        }
        for name in arms
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="the time of one arm in one round")
    args = parser.parse_args()
    scratch = scratch_dir()
    server = Server(scratch, "--memory", "2GiB")
    try:
        out = {}
        for size, count in ((110_000, 2_000), (4_096, 20_000)):
            tree = scratch / f"files-{size}"
            tree.mkdir()
            for i in range(count):
                (tree / f"{i:06}").write_bytes(random.randbytes(size))
            server.publish(tree.name, tree)
            out[tree.name] = row(server, tree, count, args.rounds, args.seconds)
        json.dump(out, sys.stdout, indent=1)
        print()
    finally:
        server.stop()
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
