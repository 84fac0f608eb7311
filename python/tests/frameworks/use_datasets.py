"""Hugging Face's datasets: tables and streams made of the datasets of this package."""

from __future__ import annotations

from typing import Any

import datasets
import torch.utils.data

from kit import BATCH, by_index, counted, epochs, option, passes, result, run_cases


def main() -> None:
    made: Any = {"passes": passes, "map": by_index, "epochs": epochs}[option("data")]()

    def items() -> Any:
        yield from (made[i] for i in range(len(made))) if option("data") == "map" else made

    if option("stream"):
        table: Any = datasets.IterableDataset.from_generator(items)
    else:
        table = datasets.Dataset.from_generator(items, cache_dir="cache")
    numbers = [int(n) for batch in torch.utils.data.DataLoader(table, BATCH) for n in batch["x"]]
    result(counted=counted(numbers))


run_cases(main)
