"""Lightning: trains and validates with its Trainer, saves, and continues from its checkpoint."""

from __future__ import annotations

import glob
import os
from typing import Any

import lightning
import torch.utils.data
from lightning.pytorch.callbacks import ModelCheckpoint

import fletch.torch
from kit import (
    BATCH, RANKS, Case, Net, by_index, counted, die_at, epochs, gathered, option, passes, result, run_cases,
    validated,
)

torch.set_num_threads(1)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.validated: list[int] = []
        self.validations: list[Any] = []
        self.val_steps = 0

    def training_step(self, batch: Any, _index: int) -> Any:
        return self.net(**batch)["loss"]

    def validation_step(self, batch: Any, _index: int) -> None:
        self.val_steps += 1
        die_at("sanity" if self.trainer.sanity_checking else "validation", self.val_steps)
        self.validated += [int(n) for n, is_real in zip(batch["x"], batch["labels"]) if is_real]

    def on_validation_epoch_end(self) -> None:
        whole = counted(gathered(self.validated))
        if not self.trainer.sanity_checking:
            self.validations.append(validated(whole))
        self.validated = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader(dataset: Any, **more: Any) -> Any:
    kind = torch.utils.data.DataLoader if option("loader") == "torch" else fletch.torch.DataLoader
    return kind(dataset, num_workers=option("workers", 0), **more)


def main() -> None:
    more, every = option("trainer", {}), option("save_every", 10)
    # "epoch" is the callback's default: it saves after the validation of each epoch.
    steps = {} if every == "epoch" else {"every_n_train_steps": every or None}
    save = ModelCheckpoint(Case.job, save_top_k=-1, **steps)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=RANKS if RANKS > 1 else 1, strategy="ddp" if RANKS > 1 else "auto",
        max_epochs=option("max_epochs", 2), logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[save] if every else [],
        enable_checkpointing=bool(every), **more,
    )
    module = Module()
    latest = max(glob.glob(f"{Case.job}/*.ckpt"), key=os.path.getmtime, default=None)
    if RANKS > 1:
        # A user makes datasets in a hook, where the process group exists.
        datamodule: Any = Data()
        trainer.fit(module, datamodule=datamodule, ckpt_path=latest)
    else:
        val = loader(passes(), batch_size=BATCH)
        trainer.fit(module, train_loader(), val, ckpt_path=latest)
    result(module.net, validations=module.validations, resumed=latest is not None)


def train_loader() -> Any:
    if option("data") == "map":
        return loader(by_index(), batch_size=BATCH)
    return loader(epochs(), **({"batch_size": BATCH} if option("loader") == "torch" else {}))


class Data(lightning.LightningDataModule):
    def train_dataloader(self) -> Any:
        return train_loader()

    def val_dataloader(self) -> Any:
        return loader(passes(), batch_size=BATCH)


run_cases(main)
