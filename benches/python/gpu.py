"""Trains a network on a GPU through Fletch, and through torchvision from the same warm local files.

    FLETCH_BIN=target/release python benches/python/gpu.py [--images 3000] [--workers 12] [--rounds 3]

Writes JSON. All arms decode real JPEG files in worker processes, pin their batches and train the same
network (ResNet-50, bfloat16), an epoch each in turns. A row has images per second, and the part of the time
in which the GPU waited for its next batch. Fletch's epochs are exactly-once: each is acknowledged, and its
receipt is compared with what the loader received. Needs a CUDA device and torchvision.
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

import torch
import torchvision
from PIL import Image
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python" / "tests"))

import fletch
import fletch.torch
from conftest import Server, scratch_dir

CLASSES = 10
BATCH = 128


def write_images(tree: Path, count: int) -> None:
    """Writes JPEG files of noise, about 60 KB each, in folders by class."""
    rng = random.Random(1)
    for i in range(count):
        folder = tree / f"class-{i % CLASSES}"
        folder.mkdir(parents=True, exist_ok=True)
        noise = Image.frombytes("RGB", (48, 36), rng.randbytes(48 * 36 * 3)).resize((480, 360))
        noise.save(folder / f"{i:05}.jpg", quality=95)


class Labelled:
    """Decodes a leased sample into pixels and class."""

    def __init__(self, look: Callable[[Any], torch.Tensor]) -> None:
        self.look = look

    def __call__(self, sample: fletch.torch.EpochSample) -> tuple[torch.Tensor, int]:
        with Image.open(io.BytesIO(sample.content)) as image:
            return self.look(image.convert("RGB")), int(sample.path.split("/")[0].removeprefix("class-"))


class Training:
    """The network and its optimizer."""

    def __init__(self) -> None:
        net = torchvision.models.resnet50(num_classes=CLASSES)
        self.net = net.cuda().to(memory_format=torch.channels_last)
        self.sgd = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    def step(self, pixels: torch.Tensor, labels: torch.Tensor) -> None:
        pixels = pixels.cuda(non_blocking=True).to(memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(self.net(pixels), labels.cuda(non_blocking=True))
        self.sgd.zero_grad()
        loss.backward()
        self.sgd.step()

    def epoch(self, batches: Iterable[Any]) -> tuple[int, float, float]:
        """Trains an epoch. Returns images, seconds, and the seconds in which the GPU waited for a batch."""
        images, waited, begun = 0, 0.0, time.perf_counter()
        ready = torch.cuda.Event()
        source = iter(batches)
        while True:
            # The GPU waits from when it has done what it was given until the next batch is there.
            ready.record()
            asked = time.perf_counter()
            batch = next(source, None)
            came = time.perf_counter()
            if ready.query():
                waited += came - asked
            if batch is None:
                break
            self.step(*batch)
            images += len(batch[1])
        torch.cuda.synchronize()
        return images, time.perf_counter() - begun, waited


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--images", type=int, default=3000)
    options.add_argument("--workers", type=int, default=12)
    options.add_argument("--rounds", type=int, default=3)
    asked = options.parse_args()
    scratch = scratch_dir()
    server = Server(scratch)
    try:
        tree = scratch / "images"
        write_images(tree, asked.images)
        server.publish("images", tree)
        look = v2.Compose([v2.PILToTensor(), v2.Resize((224, 224)), v2.ToDtype(torch.float32, scale=True)])
        pinned = {"num_workers": asked.workers, "pin_memory": True}
        workers = {**pinned, "persistent_workers": True}
        client = fletch.Client(f"unix:{server.socket}", job="gpu")
        epochs = fletch.torch.EpochDataset(
            client, "images", job="gpu", batch_size=BATCH, transform=Labelled(look)
        )
        images = fletch.torch.ImageFolder(client.resolve("images"), transform=look)
        arms = {
            "fletch, EpochDataset": fletch.torch.DataLoader(epochs, **pinned),
            "fletch, ImageFolder": fletch.torch.DataLoader(images, BATCH, shuffle=True, **workers),
            "torchvision, local files": torch.utils.data.DataLoader(
                torchvision.datasets.ImageFolder(tree, transform=look), BATCH, shuffle=True, **workers
            ),
        }
        training, rows = Training(), {arm: [] for arm in arms}
        for number in range(asked.rounds + 1):
            for arm, batches in arms.items():
                if arm == "fletch, EpochDataset":
                    epochs.set_epoch(number)
                images, seconds, waited = training.epoch(batches)
                assert images == asked.images, f"{arm}: {images} of {asked.images} images"
                if arm == "fletch, EpochDataset":
                    proof = epochs.stats()
                    assert proof["receipt"] == "agrees", proof
                # The first is to warm up.
                if number > 0:
                    rows[arm].append((images / seconds, waited / seconds))
        figures = [
            {
                "arm": arm,
                "images_per_second": [round(rate) for rate, _ in measured],
                "median": round(statistics.median(rate for rate, _ in measured)),
                "gpu_waited": round(statistics.median(part for _, part in measured), 3),
            }
            for arm, measured in rows.items()
        ]
    finally:
        server.stop()
        shutil.rmtree(scratch)
    machine = {"cores": os.cpu_count(), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    json.dump({"machine": machine, "rows": figures}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
