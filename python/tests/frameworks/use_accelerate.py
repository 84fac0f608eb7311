"""Hugging Face Accelerate: a plain loop, and what its functions make of a loader."""

from __future__ import annotations

import os
import shutil
from typing import Any

import accelerate
import torch
import torch.utils.data
from accelerate.utils import DataLoaderConfiguration

import fletch.torch
from kit import (
    BATCH, RANK, Case, Net, by_index, counted, die_at, epochs, gathered, option, passes, result, run_cases,
    validated,
)

torch.set_num_threads(1)


def real(batch: Any) -> list[int]:
    return [int(n) for n, is_real in zip(batch["x"], batch["labels"]) if is_real]


def train(accelerator: Any) -> None:
    """The loop of docs/howto/accelerate.md."""
    data = epochs()
    loader = fletch.torch.DataLoader(data, num_workers=option("workers", 0))
    net = Net()
    plain = net
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
    accelerator.register_for_checkpointing(loader)
    first = 0
    if os.path.isdir(Case.job):
        accelerator.load_state(Case.job)
        state = data.state_dict()
        first = state["epoch"] + state["finished"]
    validations = []
    for _epoch in range(first, option("max_epochs", 2)):
        net.train()
        for step, batch in enumerate(loader, 1):
            loss = net(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if step % option("save_every", 10) == 0:
                save(accelerator)
        net.eval()
        if option("eval"):
            seen = []
            for at, batch in enumerate(fletch.torch.DataLoader(passes(pad=True), batch_size=BATCH), 1):
                die_at("validation", at)
                net(**batch)
                seen += real(batch)
            validations.append(validated(counted(gathered(seen))))
    result(plain, validations=validations, first=first)


def save(accelerator: Any) -> None:
    accelerator.save_state(f"{Case.job}.new")
    accelerator.wait_for_everyone()
    if RANK == 0:
        # No process is killed in here; the page's program shows how to replace a folder in one step.
        shutil.rmtree(Case.job, ignore_errors=True)
        os.rename(f"{Case.job}.new", Case.job)
    accelerator.wait_for_everyone()


def loader_of(kind: str, dataset: Any) -> Any:
    if kind == "torch":
        return torch.utils.data.DataLoader(dataset, BATCH, num_workers=option("workers", 0))
    size = {} if isinstance(dataset, fletch.torch.EpochDataset) else {"batch_size": BATCH}
    return fletch.torch.DataLoader(dataset, num_workers=option("workers", 0), **size)


def wrap(accelerator: Any) -> None:
    """One wrapped pass: ``wrap`` is what is done with the loader."""
    whole = {"rank": 0, "ranks": 1}
    makers = {"epochs": epochs, "passes": passes, "whole": lambda: passes(**whole), "map": by_index,
              "epochs-whole": lambda: epochs(**whole, tail="keep")}
    loader = loader_of(option("loader", "fletch"), makers[option("data")]())
    for step in option("wrap"):
        if step == "prepare":
            loader = accelerator.prepare(loader)
        elif step == "skip":
            loader = accelerate.skip_first_batches(loader, 3)
        elif step == "skip0":
            loader = accelerate.skip_first_batches(loader, 0)
        elif step == "stateful":
            from torchdata.stateful_dataloader import StatefulDataLoader

            loader = StatefulDataLoader(loader.dataset, batch_size=BATCH, num_workers=option("workers", 0))
    numbers = []
    for at, batch in enumerate(loader, 1):
        die_at("batch", at)
        if not isinstance(batch, dict):
            raise AssertionError(f"the loop got a {type(batch).__name__}")
        if option("metrics"):
            numbers += [int(n) for n in accelerator.gather_for_metrics(batch["x"])]
        else:
            numbers += real(batch)
    if not option("metrics"):
        # Once, because the ranks' counts may differ.
        numbers = gathered(numbers)
    result(counted=counted(numbers))


def main() -> None:
    # Each case configures Accelerate anew.
    accelerate.state.GradientState._reset_state()
    accelerate.state.AcceleratorState._reset_state()
    accelerator = accelerate.Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(**option("config", {}))
    )
    train(accelerator) if option("wrap") is None else wrap(accelerator)


run_cases(main)
