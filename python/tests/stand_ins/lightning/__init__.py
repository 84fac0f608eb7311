"""A stand-in for Lightning: its trainer's calls of a loader, in their order, without anything else.

Checked against Lightning 2.6 by `make accept-frameworks`, which runs the same programs with Lightning itself.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed


class LightningDataModule:
    def setup(self, stage: str) -> None: ...


class LightningModule(torch.nn.Module):
    trainer: Any = None

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None: ...

    def on_validation_epoch_start(self) -> None: ...

    @property
    def global_step(self) -> int:
        return int(self.trainer.global_step)

    @property
    def global_rank(self) -> int:
        return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


class Trainer:
    """Fits a module: a sanity check, epochs of batches with checkpoints, a validation after each."""

    def __init__(self, max_epochs: int, callbacks: Any = (), limit_val_batches: Any = None, **_: Any) -> None:
        self.max_epochs, self.callbacks, self.limit = max_epochs, callbacks, limit_val_batches
        self.global_step = self.current_epoch = 0
        self.sanity_checking = False
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")

    def fit(self, module: Any, loader: Any = None, val: Any = None, datamodule: Any = None,
            ckpt_path: str | None = None) -> None:
        module.trainer, self.module = self, module
        if datamodule is not None:
            datamodule.setup("fit")
            loader, val = datamodule.train_dataloader(), datamodule.val_dataloader()
        self.loader, self.optimizer = loader, module.configure_optimizers()
        self.fit_loop = _FitLoop(self)
        if ckpt_path is not None:
            self._restore(torch.load(ckpt_path))
        self.fit_loop.setup_data()
        if val is not None:
            self.sanity_checking = True
            self.validate(val, 2)
            self.sanity_checking = False
        while self.current_epoch < self.max_epochs:
            self.fit_loop.advance()
            if val is not None:
                self.validate(val, self.limit)
            for callback in self.callbacks:
                callback.on_epoch_end(self)

    def validate(self, val: Any, most: int | None) -> None:
        self.module.eval()
        self.module.on_validation_epoch_start()
        batches = iter(val)
        for index in range(len(val) if most is None else most):
            self.module.validation_step(next(batches), index)
        self.module.on_validation_epoch_end()

    def save(self, path: str) -> None:
        # On every rank; the first one writes.
        states = [self.loader.state_dict()] if hasattr(self.loader, "state_dict") else []
        saved = {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict(), "data": states,
                 "step": self.global_step, "epoch": self.current_epoch, "batch": self.fit_loop.batch}
        if self.module.global_rank == 0:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            torch.save(saved, f"{path}.new")
            os.replace(f"{path}.new", path)

    def _restore(self, saved: dict[str, Any]) -> None:
        self.module.load_state_dict(saved["module"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.global_step, self.current_epoch = saved["step"], saved["epoch"]
        self.fit_loop.batch, self.fit_loop._combined_loader_states_to_load = saved["batch"], saved["data"]
        # After a whole epoch Lightning does not restart, and loads no state of a loader.
        self.fit_loop.restarting = saved["batch"] > 0


class _FitLoop:
    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.batch, self.restarting = trainer, 0, False
        self._combined_loader_states_to_load: list[Any] = []

    def setup_data(self) -> None:
        if self.restarting and self._combined_loader_states_to_load:
            self.trainer.loader.load_state_dict(self._combined_loader_states_to_load.pop())
        self.iterator = iter(self.trainer.loader)

    def advance(self) -> None:
        """One epoch. It counts batches, and never asks for one after the last."""
        trainer, module = self.trainer, self.trainer.module
        module.train()
        while self.batch < len(trainer.loader):
            batch = next(self.iterator)
            trainer.optimizer.zero_grad()
            module.training_step(batch, self.batch).backward()
            if torch.distributed.is_initialized():
                # As the gradients do: no rank makes a step before all of them have its batch.
                torch.distributed.barrier()
            trainer.optimizer.step()
            self.batch += 1
            trainer.global_step += 1
            for callback in trainer.callbacks:
                callback.on_train_batch_end(trainer)
            module.on_train_batch_end(None, batch, self.batch)
        self.batch, self.restarting = 0, False
        trainer.current_epoch += 1
        if trainer.current_epoch < trainer.max_epochs:
            self.iterator = iter(trainer.loader)
