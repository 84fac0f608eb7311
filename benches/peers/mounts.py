"""Reads a bucket through mounts: Fletch and what runs beside it here. `run.sh` says how to start it."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable

import boto3
from moto.server import ThreadedMotoServer
from werkzeug.serving import WSGIRequestHandler

BIN = Path(os.environ["FLETCH_BIN"])
BUCKET = "bench"
#: A server that sends small answers late would flatter every cache.
WSGIRequestHandler.disable_nagle_algorithm = True
#: HTTP/1.1 keeps connections open, as stores do.
WSGIRequestHandler.protocol_version = "HTTP/1.1"
#: The most time in which a mount must show its files.
WITHIN = 180.0


class Store:
    """An S3 server in this process, with a bucket of incompressible objects. It counts requests."""

    def __init__(self, objects: int) -> None:
        self.requests = 0
        self.lock = threading.Lock()

        def counted(handler: Any, *words: Any) -> None:
            with self.lock:
                self.requests += 1

        WSGIRequestHandler.log_request = counted  # type: ignore[method-assign]
        self.server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self.server.start()
        host, port = self.server.get_host_and_port()
        self.url = f"http://{host}:{port}"
        self.s3 = self.client()
        self.s3.create_bucket(Bucket=BUCKET)
        rng = random.Random(1)
        self.hashes: dict[str, str] = {}
        self.bytes = 0
        for i in range(objects):
            name, content = f"class-{i % 8}/{i:05}.bin", rng.randbytes(rng.randrange(20_000, 30_000))
            self.s3.put_object(Bucket=BUCKET, Key=f"set/{name}", Body=content)
            self.hashes[name] = hashlib.sha256(content).hexdigest()
            self.bytes += len(content)

    def client(self) -> Any:
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=self.url, **keys)

    def stop(self) -> None:
        self.server.stop()


def environment(store: Store, home: Path) -> dict[str, str]:
    """The variables of a user at a terminal, with the credentials of the bucket."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "FLETCH_", "RCLONE_"))}
    return kept | {
        "HOME": str(home),
        "XDG_RUNTIME_DIR": str(home),
        "FLETCH_STATE_DIR": str(home / "state"),
        "FLETCH_CACHE_DIR": str(home / "cache"),
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": store.url,
    }


def read_all(root: Path, store: Store, seed: int, readers: int) -> float:
    """Reads every file in a random order, by some threads, and checks it. Returns the seconds."""
    names = list(store.hashes)
    random.Random(seed).shuffle(names)

    def is_right(name: str) -> bool:
        return hashlib.sha256((root / name).read_bytes()).hexdigest() == store.hashes[name]

    begun = time.monotonic()
    with ThreadPoolExecutor(readers) as pool:
        for name, right in zip(names, pool.map(is_right, names), strict=True):
            if not right:
                sys.exit(f"wrong bytes: {root / name}")
    return time.monotonic() - begun


class Mount:
    """A mount of the bucket: how it is made, and how it ends."""

    def __init__(self, store: Store, home: Path) -> None:
        self.store, self.home, self.dir = store, home, home / "mnt"
        self.dir.mkdir(parents=True)
        self.env = environment(store, home)
        self.processes: list[subprocess.Popen[bytes]] = []

    def run(self, *words: object) -> None:
        done = subprocess.run([str(w) for w in words], env=self.env, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{words[0]}: {done.stdout}{done.stderr}")

    def spawn(self, *words: object) -> None:
        log = open(self.home / "log", "ab")
        self.processes.append(subprocess.Popen([str(w) for w in words], env=self.env, stdout=log, stderr=log))

    def await_files(self) -> None:
        end = time.monotonic() + WITHIN
        while not any(self.dir.iterdir()):
            if time.monotonic() > end:
                sys.exit((self.home / "log").read_text())
            time.sleep(0.02)

    def root(self) -> Path:
        return self.dir

    def begin(self) -> None:
        raise NotImplementedError

    def end(self) -> None:
        subprocess.run(["umount", self.dir], check=True)
        for process in self.processes:
            process.wait(30)


class Fletch(Mount):
    """`fletch mount`: starts a server, reads the bucket once, mounts."""

    def begin(self) -> None:
        self.run(BIN / "fletch", "mount", f"s3://{BUCKET}/set", self.dir)

    def end(self) -> None:
        self.run(BIN / "fletch", "down")


class Rclone(Mount):
    """rclone, as its documentation advises for a read-only mount of many small files."""

    def begin(self) -> None:
        remote = f":s3,provider=Other,env_auth=true,endpoint='{self.store.url}':{BUCKET}/set"
        self.spawn(
            *("rclone", "mount", remote, self.dir, "--read-only", "--config", "/dev/null"),
            *("--vfs-cache-mode", "full", "--cache-dir", self.home / "cache"),
            *("--dir-cache-time", "1h", "--attr-timeout", "1h", "--no-modtime", "--no-checksum"),
        )
        self.await_files()


class S3fs(Mount):
    """s3fs with its cache on disk and its cache of attributes."""

    def begin(self) -> None:
        passwd = self.home / "passwd"
        passwd.write_text("test:test\n")
        passwd.chmod(0o600)
        options = f"ro,url={self.store.url},use_path_request_style,endpoint=us-east-1,sigv4"
        options += f",passwd_file={passwd},use_cache={self.home / 'cache'},stat_cache_expire=3600"
        options += ",complement_stat,enable_noobj_cache,max_stat_cache_size=100000"
        self.spawn("s3fs", f"{BUCKET}:/set", self.dir, "-f", "-o", options)
        self.await_files()


SYSTEMS: dict[str, tuple[str | None, Callable[[Store, Path], Mount]]] = {
    "fletch": (None, Fletch),
    "rclone": ("rclone", Rclone),
    "s3fs": ("s3fs", S3fs),
}


def bare(store: Store) -> float:
    """Returns the seconds of reading every object once, 64 at once, without any file system."""
    keys = [f"set/{name}" for name in store.hashes]
    local = threading.local()

    def get(key: str) -> int:
        if not hasattr(local, "s3"):
            local.s3 = store.client()
        return len(local.s3.get_object(Bucket=BUCKET, Key=key)["Body"].read())

    begun = time.monotonic()
    with ThreadPoolExecutor(64) as pool:
        assert sum(pool.map(get, keys)) == store.bytes
    return time.monotonic() - begun


def measure(
    make: Callable[[Store, Path], Mount], store: Store, seed: int, readers: int
) -> dict[str, float]:
    home = Path(tempfile.mkdtemp(prefix="peers-"))
    mount = make(store, home)
    before, begun = store.requests, time.monotonic()
    mount.begin()
    usable = time.monotonic() - begun
    try:
        first = read_all(mount.root(), store, seed, readers)
        requests = store.requests - before
        second = read_all(mount.root(), store, seed + 1, readers)
        disk = sum(p.stat().st_blocks * 512 for p in home.rglob("*") if mount.dir not in p.parents)
    finally:
        mount.end()
    shutil.rmtree(home)
    return {
        "usable_s": usable,
        "first_pass_s": first,
        "usable_and_first_pass_s": usable + first,
        "second_pass_s": second,
        "requests": float(requests),
        "disk_of_data": disk / store.bytes,
    }


def version(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--objects", type=int, default=2000)
    parser.add_argument("--readers", type=int, default=1, help="threads that read")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--installed", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    present = {name: make for name, (tool, make) in SYSTEMS.items() if tool is None or shutil.which(tool)}
    for name in SYSTEMS.keys() - present.keys():
        print(f"not installed, left out: {name} (run.sh --install)", file=sys.stderr)
    store = Store(args.objects)
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in present}
    bares, loads = [], []
    for n in range(args.rounds):
        loads.append(os.getloadavg()[0])
        bares.append(bare(store))
        for name, make in present.items():
            figures[name].append(measure(make, store, 2 * n, args.readers))
    store.stop()
    head = {
        "objects": args.objects,
        "bytes": store.bytes,
        "rounds": args.rounds,
        "readers": args.readers,
        "cores": os.cpu_count(),
        "load": loads,
        "versions": [version([str(BIN / "fletch"), "--version"])]
        + [version([tool, "--version"]) for name, (tool, _) in SYSTEMS.items() if tool and name in present],
        "bare_read_s": bares,
    }
    print(json.dumps(head))
    print("system   usable s  first pass s  both s (min-max)   second pass s  requests  disk / data")
    for name, rounds in figures.items():
        of = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
        both = [r["usable_and_first_pass_s"] for r in rounds]
        spread = f"{of['usable_and_first_pass_s']:.2f} ({min(both):.2f}-{max(both):.2f})"
        print(
            f"{name:<8} {of['usable_s']:>8.2f}  {of['first_pass_s']:>12.2f}  {spread:<18}"
            f"  {of['second_pass_s']:>12.2f}  {of['requests']:>8.0f}  {of['disk_of_data']:>10.2f}"
        )
    if args.json:
        args.json.write_text(json.dumps({**head, "systems": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
