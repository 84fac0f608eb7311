"""Trains a small net on real images, for one arm and one seed of the parity study after the other.

    train.py --data OUT [--orders DIR] --arm fletch|random|sorted --seeds FIRST-LAST --results FILE

Appends one JSON line a run, and skips runs that have a line. Uses one thread.

The arms differ in the order of the samples of each epoch, and in nothing else:
    fletch  as a real server delivered: the k-th seed (from 0) takes three epochs of job k % 3, the first of
            them 2 + 3 * (k // 3)
    random  a uniform permutation for each epoch, from the seed
    sorted  path order, which is class by class, in every epoch
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

SIDE = 16
EPOCHS = 3
BATCH = 64
PEAK = 0.1
JOBS = 3
WARM = 2

Set = "tuple[torch.Tensor, torch.Tensor]"


def load(top: Path) -> Set:
    """Returns pixels (n x 3 x 16 x 16, 0 to 1) and labels in path order: sample k of the version is row k."""
    paths = sorted(top.rglob("*.bmp"), key=lambda p: p.relative_to(top).as_posix().encode())
    x = np.empty((len(paths), SIDE, SIDE, 3), dtype=np.float32)
    y = np.empty(len(paths), dtype=np.int64)
    for i, path in enumerate(paths):
        with Image.open(path) as image:
            x[i] = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR), dtype=np.float32) / 255
        y[i] = int(path.parent.name[:2])
    return torch.from_numpy(x).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(y)


def net(classes: int) -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    features = (SIDE // 4) ** 2 * 32
    return nn.Sequential(*block(3, 16), *block(16, 32), nn.Flatten(), nn.Linear(features, classes))


def delivered(orders: Path, turn: int, n: int) -> list[np.ndarray]:
    """Returns the recorded epochs of the k-th seed (from 0), each checked to be a permutation of the plan."""
    job, first = turn % JOBS, WARM + EPOCHS * (turn // JOBS)
    lines = (orders / f"job-{job}.txt").read_text().splitlines()[first : first + EPOCHS]
    if len(lines) < EPOCHS:
        raise SystemExit(f"turn {turn}: job {job} has not {first + EPOCHS} whole epochs")
    epochs = [np.array(line.split(), dtype=np.int64) for line in lines]
    for k, epoch in enumerate(epochs):
        if not np.array_equal(np.sort(epoch), np.arange(n)):
            raise SystemExit(f"job {job}, epoch {first + k}: no permutation of the {n} samples")
    return epochs


def epochs_of(arm: str, seed: int, turn: int, n: int, orders: Path | None) -> list[np.ndarray]:
    if arm == "fletch":
        assert orders is not None, "--orders"
        return delivered(orders, turn, n)
    if arm == "random":
        rng = np.random.default_rng(seed)
        return [rng.permutation(n) for _ in range(EPOCHS)]
    return [np.arange(n)] * EPOCHS


def run(train: Set, test: Set, orders: list[np.ndarray], seed: int) -> float:
    """Returns the accuracy on the test set after the last epoch, in per cent."""
    torch.manual_seed(seed)
    (x, y), (x_test, y_test) = train, test
    mean, std = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    x, x_test = (x - mean) / std, (x_test - mean) / std
    model = net(int(y.max()) + 1)
    steps = -(-len(x) // BATCH)
    optimizer = torch.optim.SGD(model.parameters(), PEAK, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK, total_steps=steps * EPOCHS)
    loss_of = nn.CrossEntropyLoss()
    model.train()
    for order in orders:
        for at in range(0, len(order), BATCH):
            rows = torch.from_numpy(order[at : at + BATCH])
            optimizer.zero_grad(set_to_none=True)
            loss_of(model(x[rows]), y[rows]).backward()
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        right = (model(x_test).argmax(1) == y_test).float().mean()
    return 100.0 * float(right)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--data", type=Path, required=True)
    options.add_argument("--orders", type=Path)
    options.add_argument("--arm", choices=["fletch", "random", "sorted"], required=True)
    options.add_argument("--seeds", required=True, help="FIRST-LAST")
    options.add_argument("--results", type=Path, required=True)
    o = options.parse_args()
    torch.set_num_threads(1)
    first, last = map(int, o.seeds.split("-"))
    done = set()
    if o.results.exists():
        lines = [json.loads(line) for line in o.results.read_text().splitlines()]
        done = {(line["arm"], line["seed"]) for line in lines}
    todo = [seed for seed in range(first, last + 1) if (o.arm, seed) not in done]
    if not todo:
        return
    train, test = load(o.data / "train"), load(o.data / "test")
    for seed in todo:
        orders = epochs_of(o.arm, seed, seed - first, len(train[0]), o.orders)
        begun = time.process_time()
        accuracy = run(train, test, orders, seed)
        line = {"arm": o.arm, "seed": seed, "accuracy": round(accuracy, 4)}
        line["cpu_seconds"] = round(time.process_time() - begun, 1)
        with o.results.open("a") as results:
            results.write(json.dumps(line) + "\n")
        print(line, flush=True)


if __name__ == "__main__":
    main()
