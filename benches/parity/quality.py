"""Measures how random recorded orders are, beside uniform shuffles of the same samples.

    quality.py --orders DIR --pack DIR --data OUT [--json FILE]

Reads the orders that bench-epochs wrote (sample numbers, an epoch a line) and drops the warm-up epochs. For
each job it prints each statistic, with the mean and deviation of as many uniform shuffles. The chunk of a
sample comes
from the tables of the pack (pyarrow).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Callable

import numpy as np

WARM = 2
LAGS = 10
BINS = 16
BATCH = 64
#: Epochs apart at which positions are compared.
APART = (1, 2, 5, 10)


class Set:
    """Class and chunk of each sample, by number."""

    def __init__(self, classes: np.ndarray, units: np.ndarray) -> None:
        self.classes, self.units, self.n = classes, units, len(units)
        sizes = np.bincount(units).astype(float)
        self.chance = float((sizes * (sizes - 1)).sum() / (self.n * (self.n - 1)))


def positions(order: np.ndarray) -> np.ndarray:
    """Returns the position of each sample in the order."""
    at = np.empty_like(order)
    at[order] = np.arange(len(order))
    return at


def numbers_chi2(epochs: np.ndarray, _: Set) -> float:
    """Chi square per degree of freedom: sixteenths of the numbers against sixteenths of the positions."""
    n = epochs.shape[1]
    table = np.zeros((BINS, BINS))
    column = np.arange(n) * BINS // n
    for order in epochs:
        np.add.at(table, (order * BINS // n, column), 1)
    expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
    return float(((table - expected) ** 2 / expected).sum() / (BINS - 1) ** 2)


def samples_chi2(epochs: np.ndarray, _: Set) -> float:
    """Chi square per degree of freedom of each sample's positions over all epochs, against equal chances."""
    n = epochs.shape[1]
    table = np.zeros((n, BINS))
    column = np.arange(n) * BINS // n
    for order in epochs:
        table[order, column] += 1
    expected = len(epochs) * np.bincount(column) / n
    return float(((table - expected) ** 2 / expected).sum() / (n * (BINS - 1)))


def serial(epochs: np.ndarray, _: Set) -> float:
    """Correlation of the sample numbers of neighbours."""
    return float(np.mean([np.corrcoef(order[:-1], order[1:])[0, 1] for order in epochs]))


def near(lags: int) -> Callable[[np.ndarray, Set], float]:
    """Neighbours from one chunk at distances 1 to `lags`, relative to chance (near, near10)."""

    def of(epochs: np.ndarray, known: Set) -> float:
        same = pairs = 0
        for order in epochs:
            units = known.units[order]
            for lag in range(1, lags + 1):
                same += int((units[lag:] == units[:-lag]).sum())
                pairs += len(units) - lag
        return same / pairs / known.chance

    return of


def _batches(epochs: np.ndarray, of: np.ndarray) -> np.ndarray:
    whole = epochs.shape[1] // BATCH * BATCH
    return of[epochs[:, :whole]].reshape(-1, BATCH)


def classes_a_batch(epochs: np.ndarray, known: Set) -> float:
    """Number of classes in a batch of 64."""
    rows = np.sort(_batches(epochs, known.classes), axis=1)
    return float(((rows[:, 1:] != rows[:, :-1]).sum(1) + 1).mean())


def chunks_a_batch(epochs: np.ndarray, known: Set) -> float:
    """Number of chunks in a batch of 64."""
    rows = np.sort(_batches(epochs, known.units), axis=1)
    return float(((rows[:, 1:] != rows[:, :-1]).sum(1) + 1).mean())


def again(apart: int) -> Callable[[np.ndarray, Set], float]:
    """Correlation of a sample's positions in two epochs that are `apart` epochs apart."""

    def of(epochs: np.ndarray, _: Set) -> float:
        at = [positions(order) for order in epochs]
        return float(np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(at, at[apart:])]))

    return of


STATISTICS: dict[str, Callable[[np.ndarray, Set], float]] = {
    "numbers × positions, χ²/df": numbers_chi2,
    "each sample × positions over epochs, χ²/df": samples_chi2,
    "serial correlation of numbers, lag 1": serial,
    "near (chunk-mates at distance 1, relative)": near(1),
    "near10 (distances 1–10, relative)": near(LAGS),
    "different classes in a batch of 64": classes_a_batch,
    "different chunks in a batch of 64": chunks_a_batch,
    **{f"positions {k} epoch{'s' if k > 1 else ''} apart, correlation": again(k) for k in APART},
}


def read(path: Path) -> np.ndarray:
    """Whole epochs after the warm-up: epochs x samples, each a permutation."""
    lines = path.read_text().splitlines()[WARM:]
    epochs = np.array([line.split() for line in lines], dtype=np.int64)
    if not (np.sort(epochs, axis=1) == np.arange(epochs.shape[1])).all():
        raise SystemExit(f"{path}: an epoch is no permutation")
    return epochs


def units_of(pack: Path) -> np.ndarray:
    """Returns the chunk of each sample, numbered from 0, from the layout with fewer chunks: the pack's."""
    import pyarrow.parquet as parquet

    layouts = []
    for path in pack.glob("fletch/versions/*/layouts/*/placement.parquet"):
        table = parquet.read_table(path)
        rows = sorted(zip(table["ordinal"].to_pylist(), table["chunk"].to_pylist()))
        numbers: dict[bytes, int] = {}
        layouts.append(np.array([numbers.setdefault(chunk, len(numbers)) for _, chunk in rows]))
    if len(layouts) != 2:
        raise SystemExit(f"{pack}: {len(layouts)} layouts, a pack and an index are looked for")
    return min(layouts, key=lambda units: units.max())


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--orders", type=Path, required=True)
    options.add_argument("--pack", type=Path, required=True)
    options.add_argument("--data", type=Path, required=True)
    options.add_argument("--json", type=Path)
    options.add_argument("--shuffles", type=int, default=20)
    o = options.parse_args()
    train = o.data / "train"
    paths = sorted(p.relative_to(train).as_posix().encode() for p in train.rglob("*.bmp"))
    classes = np.array([int(p[:2]) for p in paths])
    units = units_of(o.pack)
    if len(units) != len(classes):
        raise SystemExit(f"{len(units)} samples in the layout, {len(classes)} files")
    known = Set(classes, units)
    jobs = [read(path) for path in sorted(o.orders.glob("job-*.txt"))]
    count = min(len(job) for job in jobs)
    jobs = [job[:count] for job in jobs]
    rng = np.random.default_rng(1)
    rows = []
    uniform: dict[str, list[float]] = {name: [] for name in STATISTICS}
    for _ in range(o.shuffles):
        epochs = np.array([rng.permutation(known.n) for _ in range(count)])
        for name, of in STATISTICS.items():
            uniform[name].append(of(epochs, known))
    print(f"{known.n} samples, {units.max() + 1} chunks, {len(jobs)} jobs, {count} epochs each\n")
    print("| statistic | delivered, by job | uniform: mean ± deviation |\n|---|---|---|")
    for name, of in STATISTICS.items():
        found = [of(job, known) for job in jobs]
        mean, deviation = float(np.mean(uniform[name])), float(np.std(uniform[name], ddof=1))
        rows.append({"statistic": name, "delivered": found, "uniform": mean, "deviation": deviation})
        print(f"| {name} | {' · '.join(f'{x:.4g}' for x in found)} | {mean:.4g} ± {deviation:.2g} |")
    if o.json:
        about = {"samples": known.n, "chunks": int(units.max()) + 1, "epochs": count, "shuffles": o.shuffles}
        o.json.write_text(json.dumps({**about, "rows": rows}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
