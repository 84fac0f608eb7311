"""Runs Fletch, mosaicml-streaming and webdataset, two jobs each, on one dataset and one slow origin.

    FLETCH_BIN=target/release python benches/python/peers.py --json benches/figures/peers.json

Each round starts every system afresh, one after the other. Each gets its own origin (`bench-origin`: 25 ms
to the first byte, 80 MB/s a response, 400 MB/s in all), empty caches, and two processes. Each process makes
`--epochs` passes over the data as fast as it can, in batches of 64 with two loader workers. The figures are
the time of an epoch and the bytes that the origin sent for it.

The cache is `--cache` of the dataset for both jobs together, by each system's own means:
    fletch      one server for both: `memory.max` and `cache.size` together
    streaming   `cache_limit`, half for each job: two jobs cannot share a directory
    webdataset  none: its cache directory has no limit, and it reads shards from end to end
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from io import BytesIO
from pathlib import Path
from typing import Any, Callable, Iterable

BIN = Path(os.environ.get("FLETCH_BIN", "target/release"))
BATCH = 64
WORKERS = 2
JOBS = 2
MEMORY = 64 << 20
#: Bytes of a shard: streaming evicts one at a time, a worker of webdataset reads one at a time.
MDS = 4 << 20
TAR = 32 << 20
SYSTEMS = ("fletch", "streaming", "webdataset")


# The process of one job.


def total(samples: list[Any]) -> tuple[int, int]:
    """Returns the samples and bytes of a batch: all that a job does with it."""
    return len(samples), sum(len(s) for s in samples)


def content(sample: dict[str, Any]) -> bytes:
    return sample["bin"]


def loader_of(system: str, job: int, at: dict[str, Any]) -> Callable[[int], Iterable[tuple[int, int]]]:
    """Returns a function that makes the loader of an epoch; each batch is its samples and bytes."""
    if system == "fletch":
        import fletch
        import fletch.torch

        client = fletch.Client(f"unix:{at['socket']}", job=f"peer-{job}")
        dataset = fletch.torch.EpochDataset(client, "set", job=f"peer-{job}", batch_size=BATCH, seed=job)
        loader = fletch.torch.DataLoader(dataset, num_workers=WORKERS, collate_fn=total)
        return lambda epoch: loader
    import torch.utils.data

    if system == "streaming":
        import streaming

        dataset = streaming.StreamingDataset(
            remote="s3://bucket/mds",
            local=f"{at['local']}/{job}",
            cache_limit=at["cache"] // JOBS,
            shuffle=True,
            shuffle_seed=job,
            # The default shuffles the whole dataset at once. With a small cache it fetches a shard again for
            # every few samples. A block that fits into half of the cache does not.
            shuffle_algo="py1br",
            shuffle_block_size=at["block"],
            predownload=2 * BATCH,
            batch_size=BATCH,
            num_canonical_nodes=1,
        )
        for stream in dataset.streams:
            # Workers are forks: they would all use the connection that fetched the index at once.
            stream._downloader.clean_up()

        class Bytes(torch.utils.data.IterableDataset):
            def __iter__(self) -> Any:
                return map(content, dataset)

        loader = torch.utils.data.DataLoader(Bytes(), BATCH, num_workers=WORKERS, collate_fn=total)
        return lambda epoch: loader
    import webdataset

    urls = [f"{at['endpoint']}/bucket/wds/{i:05}.tar" for i in range(at["shards"])]

    def of(epoch: int) -> Iterable[tuple[int, int]]:
        seed = job * 1000 + epoch
        shards = webdataset.WebDataset(urls, shardshuffle=len(urls), seed=seed, empty_check=False)
        samples = shards.shuffle(1000).map(content)
        return torch.utils.data.DataLoader(samples, BATCH, num_workers=WORKERS, collate_fn=total)

    return of


def job(system: str, number: int, epochs: int, at: dict[str, Any]) -> None:
    """Reads the epochs of one job, and prints a line for each. The first line of the input starts it."""
    loader = loader_of(system, number, at)
    print("ready", flush=True)
    sys.stdin.readline()
    for epoch in range(epochs):
        begun, samples, length = time.monotonic(), 0, 0
        for n, b in loader(epoch):
            samples += n
            length += b
        both = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        used = sum(sum(resource.getrusage(who)[:2]) for who in both)
        line = {"seconds": time.monotonic() - begun, "samples": samples, "bytes": length, "cpu": used}
        print(json.dumps(line), flush=True)


# The process that starts and measures all others.


class Child:
    """A child process, stopped by its id, whose output is read line by line."""

    def __init__(self, command: list[Any], log: Path, **more: Any) -> None:
        with log.open("ab") as err:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, text=True, **more
            )

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"{self.process.args} said nothing more, exit {self.process.wait()}"
        return line.strip()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def cpu(self) -> float:
        """Returns the CPU seconds used so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def make(bucket: Path, samples: int, length: int) -> int:
    """Writes the same samples as files, MDS shards and tar shards. Returns the number of tars."""
    import streaming

    rng = random.Random(1)
    files = bucket / "set"
    files.mkdir(parents=True)
    with streaming.MDSWriter(out=str(bucket / "mds"), columns={"bin": "bytes"}, size_limit=MDS) as mds:
        shards, room = 0, 0
        (bucket / "wds").mkdir()
        tar = None
        for i in range(samples):
            body = rng.randbytes(length)
            (files / f"{i:06}.bin").write_bytes(body)
            mds.write({"bin": body})
            if room < length or tar is None:
                if tar is not None:
                    tar.close()
                tar, room = tarfile.open(bucket / "wds" / f"{shards:05}.tar", "w"), TAR
                shards += 1
            member = tarfile.TarInfo(f"{i:06}.bin")
            member.size = length
            tar.addfile(member, BytesIO(body))
            room -= length + 512
        assert tar is not None
        tar.close()
    return shards


def config(scratch: Path, endpoint: str) -> Path:
    path = scratch / "fletch.toml"
    path.write_text(
        f'[[origin]]\nprefix = "s3://bucket"\nendpoint = "{endpoint}"\nallow_http = true\n'
        'credentials = "anonymous"\nregion = "local"\n'
    )
    return path


def origin(scratch: Path, *more: str) -> tuple[Child, str]:
    child = Child([BIN / "bench-origin", "--dir", scratch / "bucket", *more], scratch / "origin.log")
    return child, child.line()


def serve(scratch: Path, endpoint: str, cache: int) -> Child:
    """Starts a server and registers the pack. Its socket is below `scratch`."""
    shutil.rmtree(scratch / "server", ignore_errors=True)
    (scratch / "server").mkdir()
    ready = scratch / "server" / "ready"
    command: list[Any] = [BIN / "fletch-server", "--listen", "127.0.0.1:0"]
    command += ["--socket", scratch / "server" / "s"]
    command += ["--cache-dir", scratch / "server" / "cache", "--state-dir", scratch / "server" / "state"]
    command += ["--memory", str(MEMORY), "--cache-size", str(cache - MEMORY), "--cache-free-floor", "0"]
    command += ["--config", config(scratch, endpoint), "--ready-file", ready]
    server = Child(command, scratch / "server.log")
    end = time.monotonic() + 60
    while not (ready.exists() and ready.read_text().startswith("http")):
        assert server.process.poll() is None and time.monotonic() < end, "the server does not start"
        time.sleep(0.02)
    register = [BIN / "fletch", "register", "set", "s3://bucket/set", "--tables", "s3://bucket/pack"]
    register += ["--quiet", "--server", ready.read_text().strip()]
    subprocess.run(register, check=True, stdout=subprocess.DEVNULL)
    return server


def measure(system: str, scratch: Path, o: argparse.Namespace, shards: int) -> dict[str, Any]:
    """Measures two jobs of a system with a fresh origin and fresh caches."""
    cache = int(o.cache * o.samples * o.bytes)
    shutil.rmtree(scratch / "local", ignore_errors=True)
    emulator, endpoint = origin(scratch, "--mb-per-s", str(o.mb_per_s))
    running = [emulator]
    try:
        at: dict[str, Any] = {"endpoint": endpoint, "cache": cache, "shards": shards}
        at["local"] = str(scratch / "local")
        at["block"] = cache // JOBS // o.bytes // 2
        if system == "fletch":
            running.append(serve(scratch, endpoint, cache))
            at["socket"] = str(scratch / "server" / "s")
        more = {"S3_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
        more |= {"AWS_DEFAULT_REGION": "us-east-1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--job", system, "--epochs", str(o.epochs)]
        command += ["--at", json.dumps(at)]
        jobs = []
        for j in range(JOBS):
            # One after the other: two jobs of streaming that start at once take the same shared memory names.
            log, env = scratch / f"{system}.log", {**os.environ, **more}
            child = Child(command + ["--number", str(j)], log, env=env)
            running.append(child)
            jobs.append(child)
            assert child.line() == "ready"

        def sent() -> dict[str, int]:
            emulator.say("counts")
            return json.loads(emulator.line())

        before = sent()
        servers = running[1:-JOBS]
        cpu = sum(c.cpu() for c in servers + jobs)
        for child in jobs:
            child.say("go")
        begun = time.monotonic()
        epochs, marks = [], []
        for _ in range(o.epochs):
            # The mark is made when the slower job has ended its epoch.
            epochs.append([json.loads(child.line()) for child in jobs])
            marks.append(sent())
        for n, lines in enumerate(epochs):
            for line in lines:
                whole = (o.samples, o.samples * o.bytes)
                got = (line["samples"], line["bytes"])
                assert got == whole, f"{system}, epoch {n}: {line}, {whole} are due"
        # The last line of a job has the CPU time of the job and its workers.
        cpu = sum(c.cpu() for c in servers) + sum(line["cpu"] for line in epochs[-1]) - cpu
        bytes_at = [before["bytes"]] + [m["bytes"] for m in marks]
        d = o.samples * o.bytes
        return {
            "system": system,
            "epoch_seconds": [round(statistics.fmean(x["seconds"] for x in lines), 2) for lines in epochs],
            "origin_per_delivered": [round((b - a) / (JOBS * d), 3) for a, b in zip(bytes_at, bytes_at[1:])],
            "origin_gets": marks[-1]["get"] - before["get"],
            "cpu_seconds_per_gb": round(cpu / (o.epochs * JOBS * d / 1e9), 2),
            "whole_seconds": round(time.monotonic() - begun, 2),
        }
    finally:
        for child in reversed(running):
            child.stop()


def summary(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Medians over rounds, with their range; the later epochs of a round are averaged."""
    rows = []
    for at, first in enumerate(rounds[0]):
        runs = [r[at] for r in rounds]
        row: dict[str, Any] = {"system": first["system"]}
        figures = {
            "first_seconds": [run["epoch_seconds"][0] for run in runs],
            "later_seconds": [statistics.fmean(run["epoch_seconds"][1:]) for run in runs],
            # Over all epochs: jobs drift apart, so bytes between marks are not those of one epoch of each.
            "origin_per_delivered": [statistics.fmean(run["origin_per_delivered"]) for run in runs],
            "cpu_seconds_per_gb": [run["cpu_seconds_per_gb"] for run in runs],
        }
        for key, of in figures.items():
            row[key] = [round(x, 3) for x in (statistics.median(of), min(of), max(of))]
        rows.append(row)
    return rows


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    options.add_argument("--samples", type=int, default=6400)
    options.add_argument("--bytes", type=int, default=110_000)
    options.add_argument("--cache", type=float, default=0.2)
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--mb-per-s", type=float, default=400)
    options.add_argument("--systems", default=",".join(SYSTEMS))
    options.add_argument("--json", type=Path)
    options.add_argument("--job", choices=SYSTEMS, help=argparse.SUPPRESS)
    options.add_argument("--number", type=int, help=argparse.SUPPRESS)
    options.add_argument("--at", type=json.loads, help=argparse.SUPPRESS)
    o = options.parse_args()
    if o.job:
        job(o.job, o.number, o.epochs, o.at)
        return
    # On SIGTERM `finally` stops the children.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    scratch = Path(tempfile.mkdtemp(prefix="peers-"))
    try:
        shards = make(scratch / "bucket", o.samples, o.bytes)
        unlimited = ["--first-byte-ms", "0", "--stream-mb-per-s", "0", "--mb-per-s", "0"]
        emulator, endpoint = origin(scratch, *unlimited)
        try:
            pack = [BIN / "fletch", "pack", "--quiet", "s3://bucket/set"]
            pack += ["--config", config(scratch, endpoint), "--to", "s3://bucket/pack"]
            pack += ["--state-dir", scratch / "pack-state"]
            subprocess.run(pack, check=True, stdout=subprocess.DEVNULL)
        finally:
            emulator.stop()
        rounds = []
        for r in range(o.rounds):
            rounds.append([measure(system, scratch, o, shards) for system in o.systems.split(",")])
            line = {"round": r, "load": os.getloadavg()[0], "systems": rounds[-1]}
            print(json.dumps(line), file=sys.stderr, flush=True)
        rows = summary(rounds)
        print("| system | first epoch, s | later epochs, s | origin / delivered | CPU s/GB |")
        print("|---|---|---|---|---|")
        for row in rows:
            cells = [f"{m:.3g} ({low:.3g}–{high:.3g})" for m, low, high in list(row.values())[1:]]
            print(f"| {row['system']} | {' | '.join(cells)} |")
        if o.json:
            machine = {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
            kept = ("samples", "bytes", "cache", "epochs", "mb_per_s")
            settings = {k: v for k, v in vars(o).items() if k in kept}
            whole = {"machine": machine, "settings": settings, "rows": rows, "rounds": rounds}
            o.json.write_text(json.dumps(whole, indent=1) + "\n")
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
