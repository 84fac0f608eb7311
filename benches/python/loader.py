"""Times the loader over a unix socket against torch reading the same warm files from the local disk.

    FLETCH_BIN=target/release python benches/python/loader.py [--rounds 7] > benches/figures/loader.json

All arms run in one program, in turns, so that a load on the machine slows all of them. A row's ratio is the
median over rounds of (rate of Fletch / rate of torch in the same round). Everything is warm: the files in the
page cache, the chunks in the server's memory. Without workers one more arm reads nothing ahead.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, Iterable

import torch.utils.data
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python" / "tests"))

import fletch
import fletch.torch
from conftest import Server, scratch_dir


class Local(torch.utils.data.Dataset):
    """Opens and reads local files, as a torch program does without Fletch."""

    def __init__(self, tree: Path, transform: Callable[[Any], Any]) -> None:
        self.paths = sorted(str(p) for p in tree.iterdir())
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        with open(self.paths[index], "rb") as file:
            return self.transform(file.read())


def size(content: bytes | memoryview) -> int:
    return len(content)


def decode(content: bytes | memoryview) -> torch.Tensor:
    with Image.open(io.BytesIO(content)) as image:
        pixels = image.convert("RGB").resize((224, 224))
    return torch.frombuffer(bytearray(pixels.tobytes()), dtype=torch.uint8).view(224, 224, 3)


def rate(loader: Iterable[Any]) -> float:
    """Makes one pass and returns samples per second."""
    begun, samples = time.perf_counter(), 0
    for batch in loader:
        samples += len(batch)
    return samples / (time.perf_counter() - begun)


def row(
    server: Server, name: str, tree: Path, transform: Callable[[Any], Any], workers: int, rounds: int
) -> dict[str, Any]:
    server.publish(name, tree)
    version = fletch.Client(f"unix:{server.socket}", job="bench").resolve(name)
    dataset = fletch.torch.MapDataset(version, transform)
    loaders = {
        "fletch": fletch.torch.DataLoader(dataset, 64, shuffle=True, num_workers=workers),
        "torch": torch.utils.data.DataLoader(Local(tree, transform), 64, shuffle=True, num_workers=workers),
    }
    if workers == 0:
        none = fletch.torch.DataLoader(dataset, 64, shuffle=True, prefetch_factor=0)
        loaders["fletch, nothing ahead"] = none
    for loader in loaders.values():
        rate(loader)
    turns = [{arm: rate(loader) for arm, loader in loaders.items()} for _ in range(rounds)]
    ratios = {arm: [turn[arm] / turn["torch"] for turn in turns] for arm in loaders if arm != "torch"}
    return {
        "row": name,
        "workers": workers,
        "files": len(dataset),
        "bytes": version.nbytes,
        "samples_per_second": {arm: round(statistics.median(turn[arm] for turn in turns)) for arm in loaders},
        "ratio": {arm: round(statistics.median(r), 3) for arm, r in ratios.items()},
        "ratios": {arm: [round(x, 3) for x in r] for arm, r in ratios.items()},
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=7)
    rounds = options.parse_args().rounds
    scratch = scratch_dir()
    server = Server(scratch)
    rng = random.Random(1)
    try:
        rows = []
        for name, count, length in (("110 KB", 1500, 110_000), ("4 KB", 10_000, 4096)):
            tree = scratch / name.replace(" ", "")
            tree.mkdir()
            for i in range(count):
                (tree / f"{i:05}").write_bytes(rng.randbytes(length))
            rows.append(row(server, tree.name, tree, size, 0, rounds))
        tree = scratch / "jpeg"
        tree.mkdir()
        for i in range(300):
            noise = Image.frombytes("RGB", (48, 36), rng.randbytes(48 * 36 * 3)).resize((480, 360))
            noise.save(tree / f"{i:05}.jpg", quality=90)
        rows.append(row(server, "jpeg", tree, decode, 2, rounds))
    finally:
        server.stop()
        shutil.rmtree(scratch)
    machine = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "torch": torch.__version__}
    json.dump({"machine": machine, "rows": rows}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
