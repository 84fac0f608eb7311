"""A stand-in for Hugging Face's transformers: its trainer's calls of loaders, in their order.

Checked against transformers 5.24 by `make accept-frameworks`, which runs the same programs with it.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import torch.distributed
import torch.utils.data


class TrainingArguments:
    def __init__(self, output_dir: str, **settings: Any) -> None:
        self.output_dir = output_dir
        self.per_device_train_batch_size = self.per_device_eval_batch_size = 8
        self.dataloader_num_workers, self.dataloader_prefetch_factor = 0, None
        self.dataloader_pin_memory, self.ignore_data_skip, self.save_steps = True, False, 500
        self.num_train_epochs, self.eval_strategy = 3, "no"
        self.__dict__.update(settings)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        self.process_index = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        self.world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        self.should_save = self.process_index == 0


class TrainerCallback:
    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None: ...

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None: ...


class IterableDatasetShard(torch.utils.data.IterableDataset[Any]):
    """Gives each process every n-th item."""

    def __init__(self, dataset: Any, num_processes: int, process_index: int) -> None:
        self.dataset, self.num_processes, self.process_index = dataset, num_processes, process_index

    def __iter__(self) -> Any:
        for at, item in enumerate(self.dataset):
            if at % self.num_processes == self.process_index:
                yield item

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.num_processes)


class SkipDataLoader(torch.utils.data.DataLoader[Any]):
    def __init__(self, dataset: Any, skip_batches: int, **settings: Any) -> None:
        super().__init__(dataset, **settings)
        self.skip_batches = skip_batches

    def __iter__(self) -> Any:
        for at, batch in enumerate(super().__iter__()):
            if at >= self.skip_batches:
                yield batch


class Trainer:
    def __init__(self, model: Any, args: Any, train_dataset: Any = None, eval_dataset: Any = None,
                 compute_metrics: Any = None, callbacks: Any = ()) -> None:
        self.model, self.args = model, args
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.compute_metrics, self.callbacks = compute_metrics, callbacks
        self.data_collator = torch.utils.data.default_collate
        self.state, self.is_in_train = SimpleNamespace(global_step=0), False

    def get_train_dataloader(self) -> Any:
        return self._loader(self.train_dataset, self.args.per_device_train_batch_size)

    def _loader(self, dataset: Any, batch_size: int) -> Any:
        if self.args.world_size > 1:
            dataset = IterableDatasetShard(dataset, self.args.world_size, self.args.process_index)
        workers = self.args.dataloader_num_workers
        return torch.utils.data.DataLoader(dataset, batch_size, num_workers=workers)

    def train(self, resume_from_checkpoint: Any = None) -> None:
        self.is_in_train = True
        loader = self.get_train_dataloader()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        steps_in_epoch, skip = len(loader), 0
        if resume_from_checkpoint:
            with open(os.path.join(resume_from_checkpoint, "trainer_state.json")) as file:
                self.state.global_step = json.load(file)["global_step"]
            self.model.load_state_dict(torch.load(os.path.join(resume_from_checkpoint, "model.pt")))
            skip = 0 if self.args.ignore_data_skip else self.state.global_step % steps_in_epoch
        for epoch in range(self.state.global_step // steps_in_epoch, int(self.args.num_train_epochs)):
            self._run_epoch(loader, skip, steps_in_epoch, resume_from_checkpoint)
            skip, resume_from_checkpoint = 0, None
        self.is_in_train = False

    def _run_epoch(self, loader: Any, skip: int, steps: int, resume_from_checkpoint: Any) -> None:
        if skip:
            loader = SkipDataLoader(loader.dataset, skip, batch_size=loader.batch_size)
        batches = iter(loader)
        self.model.train()
        # Trainer counts: it asks for a batch until the epoch's steps are done, also after the last one.
        for _ in range(skip, steps):
            inputs = next(batches, None)
            if inputs is None:
                continue
            self.optimizer.zero_grad()
            self.model(**inputs)["loss"].backward()
            if torch.distributed.is_initialized():
                # As the gradients do: no rank makes a step before all of them have its batch.
                torch.distributed.barrier()
            self.optimizer.step()
            self.state.global_step += 1
            if self.state.global_step % self.args.save_steps == 0:
                self._save_checkpoint()
        for callback in self.callbacks:
            callback.on_epoch_end(self.args, self.state, None)
        if self.args.eval_strategy == "epoch":
            self.evaluate()

    def _save_checkpoint(self) -> None:
        folder = os.path.join(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        self.save_model(folder, _internal_call=True)
        if self.args.should_save:
            with open(os.path.join(folder, "trainer_state.json"), "w") as file:
                json.dump({"global_step": self.state.global_step}, file)
        for callback in self.callbacks:
            callback.on_save(self.args, self.state, None)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        folder = output_dir or self.args.output_dir
        os.makedirs(folder, exist_ok=True)
        if self.args.should_save:
            torch.save(self.model.state_dict(), os.path.join(folder, "model.pt"))

    def evaluate(self) -> None:
        outputs: list[Any] = []
        self.model.eval()
        with torch.no_grad():
            for inputs in self._loader(self.eval_dataset, self.args.per_device_eval_batch_size):
                logits = self.model(**inputs)["logits"]
                outputs += zip(logits.tolist(), inputs["labels"].tolist())
        if torch.distributed.is_initialized():
            parts: list[Any] = [None] * self.args.world_size
            torch.distributed.all_gather_object(parts, outputs)
            outputs = [one for part in parts for one in part]
        if self.compute_metrics is not None:
            predicted, labels = (numpy.array(column) for column in zip(*outputs))
            self.compute_metrics(SimpleNamespace(predictions=predicted, label_ids=labels))
