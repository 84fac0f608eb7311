"""Hugging Face's Trainer, and the package's subclass of it."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from fletch.torch.hugging_face import EpochTrainer
from kit import (
    BATCH, Case, Net, by_index, counted, die_at, epochs, option, passes, result, run_cases, validated,
)

torch.set_num_threads(1)
evaluations: list[Any] = []


class Validating(transformers.TrainerCallback):
    steps = 0

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        self.steps += 1
        die_at("validation", self.steps)


def measure(predicted: Any) -> dict[str, float]:
    evaluations.append(validated(counted([int(n) for n in predicted.predictions])))
    return {}


def main() -> None:
    evaluations.clear()
    args = transformers.TrainingArguments(
        Case.job, per_device_train_batch_size=BATCH, per_device_eval_batch_size=BATCH,
        num_train_epochs=option("max_epochs", 2), report_to=[], disable_tqdm=True, use_cpu=True,
        save_strategy="steps" if option("save_every") else "no", save_steps=option("save_every", 500),
        eval_strategy="epoch" if option("eval") else "no", dataloader_num_workers=option("workers", 0),
        logging_strategy="no", **option("args", {}),
    )
    data: Any = {"epochs": epochs, "map": by_index}[option("data", "epochs")]()
    whole = {"rank": 0, "ranks": 1}
    evals = {"whole": lambda: passes(**whole), "parts": passes, "map": by_index, None: lambda: None}
    kind = transformers.Trainer if option("plain") else EpochTrainer
    trainer = kind(
        Net(), args, train_dataset=data, eval_dataset=evals[option("eval")](), compute_metrics=measure,
        callbacks=[Validating()],
    )
    if option("only_eval"):
        trainer.evaluate()
        trainer.evaluate()
        result(validations=evaluations)
        return
    trainer.train(resume_from_checkpoint=option("resume"))
    result(trainer.model, validations=evaluations, global_step=trainer.state.global_step)


run_cases(main)
