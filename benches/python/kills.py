"""Measures the reads of a mount while the process that serves it is killed ten times, and draws them.

    sudo FLETCH_BIN=target/release python3 benches/python/kills.py [--json FILE] [--svg FILE]

Four processes read random files of 100 KB through the mount, and check each one. Between two reads of a file
its pages are dropped from the page cache, so every read asks the mount. The process is killed with SIGKILL
once a second, at a random moment of it. A read that fails, or has other bytes, ends the run.

It prints the reads a second before the first kill, the slowest read, and how long no read ended around each
kill. The picture has the reads that ended in each fiftieth of a second.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "figures"))
from sweep_pictures import Svg  # noqa: E402

BIN = Path(os.environ.get("FLETCH_BIN", "target/release")).resolve()
FILES, FILE_BYTES, READERS = 400, 100_000, 4
BEFORE_S, KILLS, AFTER_S, BUCKET_S = 2.0, 10, 2.0, 0.02


def content_of(number: int) -> bytes:
    return hashlib.shake_128(b"%d" % number).digest(FILE_BYTES)


def read_until(stop: Path, mount: Path, seed: int, to: Path) -> None:
    """Reads files until `stop` exists. Writes when each read began and ended."""
    rng, known, times = random.Random(seed), [content_of(n) for n in range(FILES)], []
    while not stop.exists():
        number = rng.randrange(FILES)
        begin = time.monotonic()
        file = os.open(mount / f"{number:04d}", os.O_RDONLY)
        got = os.pread(file, FILE_BYTES, 0)
        times.append((begin, time.monotonic()))
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
        if got != known[number]:
            raise ValueError(f"file {number} has other bytes")
    to.write_text(json.dumps(times))


def worker_of(keeper: int) -> int | None:
    children = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    return int(children[0]) if children else None


def run(scratch: Path) -> tuple[list[tuple[float, float]], list[float]]:
    """Returns when each read began and ended, and when the process was killed."""
    tree, tables, mount = (scratch / name for name in ("tree", "tables", "mount"))
    tree.mkdir()
    mount.mkdir()
    for number in range(FILES):
        (tree / f"{number:04d}").write_bytes(content_of(number))
    socket, stop = scratch / "socket", scratch / "stop"
    own = {"FLETCH_STATE_DIR": str(scratch / "state"), "FLETCH_SERVER": f"unix:{socket}"}
    environment = {**os.environ, **own}
    quiet = {"env": environment, "stdout": subprocess.DEVNULL, "check": True}
    subprocess.run([BIN / "fletch", "index", tree, "--to", tables, "--quiet"], **quiet)
    flags = ["--listen", "none", "--socket", socket, "--state-dir", scratch / "state"]
    flags += ["--cache-dir", scratch / "cache", "--cache-size", "0"]
    log = open(scratch / "log", "wb")
    server = subprocess.Popen([BIN / "fletch-server", *flags], env=environment, stderr=log)
    while not socket.exists():
        time.sleep(0.01)
    subprocess.run([BIN / "fletch", "register", "kills", tree, "--tables", tables], **quiet)
    command = [BIN / "fletch-mount", "kills", mount, "--cache-dir", scratch / "mount-cache"]
    keeper = subprocess.Popen(command, env=environment, stderr=log)
    while not mount.is_mount():
        time.sleep(0.01)
    readers = []
    for seed in range(READERS):
        pid = os.fork()
        if pid == 0:
            try:
                read_until(stop, mount, seed, scratch / f"times-{seed}")
            except (OSError, ValueError) as error:
                print(f"a reader: {error}", file=sys.stderr)
                os._exit(1)
            os._exit(0)
        readers.append(pid)
    rng, kills = random.Random(1), []
    time.sleep(BEFORE_S)
    for _ in range(KILLS):
        late = rng.uniform(0, 0.5)
        time.sleep(late)
        while (worker := worker_of(keeper.pid)) is None:
            time.sleep(0.001)
        kills.append(time.monotonic())
        os.kill(worker, signal.SIGKILL)
        time.sleep(1 - late)
    time.sleep(AFTER_S)
    stop.touch()
    failed = [pid for pid in readers if os.waitpid(pid, 0)[1] != 0]
    keeper.send_signal(signal.SIGTERM)
    keeper.wait(30)
    server.send_signal(signal.SIGTERM)
    server.wait(30)
    if failed:
        raise SystemExit("a read failed")
    times = [json.loads((scratch / f"times-{seed}").read_text()) for seed in range(READERS)]
    return sorted((begin, end) for reader in times for begin, end in reader), kills


def draw(rates: list[float], kills: list[float], path: Path) -> None:
    width, height, left, right, top, bottom = 960, 330, 70, 930, 66, 270
    about = f"The rate drops at each of {len(kills)} kills, for some hundredths of a second, and returns."
    style = ".kill { stroke: #cf4a00; stroke-width: 1.4; stroke-dasharray: 3 3 }"
    svg = Svg(width, height, "Reads a second while what serves a mount is killed", about, style)
    title = "Reads a second through a mount whose process is killed ten times (dashed); none failed"
    svg.text(24, 34, title, "title")
    most = max(rates) * 1.08
    at = lambda second: left + second / (len(rates) * BUCKET_S) * (right - left)  # noqa: E731
    high = lambda rate: bottom - rate / most * (bottom - top)  # noqa: E731
    step = 10 ** (len(str(int(most))) - 1)
    for tick in range(0, int(most) + 1, step):
        svg.line(left, high(tick), right, high(tick), "grid")
        svg.text(left - 8, high(tick) + 4, f"{tick:,}", "note", "end")
    for second in range(0, int(len(rates) * BUCKET_S) + 1, 2):
        svg.text(at(second), bottom + 20, str(second), "note", "middle")
    for kill in kills:
        svg.line(at(kill), top, at(kill), bottom, "kill")
    middle = [(at((i + 0.5) * BUCKET_S), high(rate)) for i, rate in enumerate(rates)]
    svg.path([f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(middle)], "line fletch")
    axis = "seconds; reads of 100 KB that ended in each fiftieth"
    svg.text((left + right) / 2, bottom + 46, axis, "note", "middle")
    svg.write(path)


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fletch-kills-") as scratch:
        times, kills = run(Path(scratch))
    origin = times[0][0]
    ends = sorted(end - origin for _, end in times)
    kills = [kill - origin for kill in kills]
    buckets = [0] * (int(ends[-1] / BUCKET_S) + 1)
    for end in ends:
        buckets[int(end / BUCKET_S)] += 1
    rates = [count / BUCKET_S for count in buckets]
    before, gaps = rates[25 : int(kills[0] / BUCKET_S)], []
    for kill in kills:
        last = max(end for end in ends if end <= kill)
        gaps.append(min(end for end in ends if end > kill + 0.001) - last)
    figures = {
        "reads": len(times),
        "reads a second before the first kill": round(statistics.median(before)),
        "slowest read, s": round(max(end - begin for begin, end in times), 3),
        "no read ended for, s": [round(gap, 3) for gap in gaps],
        "kills, s": [round(kill, 3) for kill in kills],
        "reads a second": rates,
    }
    for name in list(figures)[:4]:
        print(f"{name}: {figures[name]}")
    if given.json:
        given.json.write_text(json.dumps(figures) + "\n")
    if given.svg:
        draw(rates, kills, given.svg)


if __name__ == "__main__":
    main()
