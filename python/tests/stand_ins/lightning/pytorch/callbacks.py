"""The callback that saves a checkpoint after every few steps, or after each epoch."""

from __future__ import annotations

from typing import Any


class ModelCheckpoint:
    def __init__(self, dirpath: str, every_n_train_steps: int | None = None, save_top_k: int = 1) -> None:
        self.dirpath, self.every = dirpath, every_n_train_steps

    def on_train_batch_end(self, trainer: Any) -> None:
        if self.every and trainer.global_step % self.every == 0:
            trainer.save(f"{self.dirpath}/step={trainer.global_step}.ckpt")

    def on_epoch_end(self, trainer: Any) -> None:
        if not self.every:
            trainer.save(f"{self.dirpath}/epoch={trainer.current_epoch}.ckpt")
