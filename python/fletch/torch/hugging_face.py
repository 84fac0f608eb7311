"""Hugging Face's trainer over an epoch dataset. Needs ``transformers``.

Invariants:
    1. A checkpoint of the trainer has the state of the job at its step, with the steps of all ranks. It is
       written before the trainer writes anything else of the checkpoint.
    2. A training that continues loads the state of the checkpoint from which the model comes. A training that
       does not continue begins with a job of which nothing was consumed.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.utils.data
from transformers import Trainer

from .. import Invalid
from .epochs import EpochDataset
from .loader import DataLoader

#: The file of a checkpoint with the job's state, and the one that the trainer writes last.
_STATE, _LAST = "fletch.pt", "trainer_state.json"


class EpochTrainer(Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` whose ``train_dataset`` is an `EpochDataset`.

    Each rank trains its share of the job, and each sample exactly once. Checkpoints have the job's state in
    ``fletch.pt``, and ``train(resume_from_checkpoint=…)`` continues from it, also after a kill and with
    another number of ranks. It sets ``ignore_data_skip``, because the server delivers what is left of the
    epoch, and so there is nothing to skip.

    Evaluation is `Trainer`'s own, which divides the samples among the ranks: give ``eval_dataset`` as
    ``EvalDataset(…, rank=0, ranks=1)`` on every rank, or as a `MapDataset`. With any other ``train_dataset``
    this class is `Trainer`.
    """

    def get_train_dataloader(self) -> torch.utils.data.DataLoader[Any]:
        """The loader over the epochs.

        Raises:
            Invalid: ``per_device_train_batch_size`` is not the dataset's ``batch_size``.
        """
        data, args = self._epochs(), self.args
        if data is None:
            return super().get_train_dataloader()  # type: ignore[no-any-return]
        if data.batch_size != args.per_device_train_batch_size:
            raise Invalid(
                f"per_device_train_batch_size is {args.per_device_train_batch_size}, and batch_size of the "
                f"EpochDataset is {data.batch_size}: give both the same number"
            )
        return DataLoader(
            data,
            num_workers=args.dataloader_num_workers,
            collate_fn=self.data_collator,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            prefetch_factor=args.dataloader_prefetch_factor,
        )

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains as `Trainer.train` does.

        Raises:
            Invalid: the checkpoint is not complete or has no state of the job. Or the job was begun before,
                and ``resume_from_checkpoint`` is not given.
        """
        data = self._epochs()
        if data is not None:
            self.args.ignore_data_skip = True
            if resume_from_checkpoint:
                resume_from_checkpoint = self._complete_checkpoint(resume_from_checkpoint)
                data.load_state_dict(torch.load(os.path.join(resume_from_checkpoint, _STATE)))
            elif data.ranks == 1 or data.rank == 0:
                self._require_a_new_job(data)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        """Saves as `Trainer.save_model` does. In a checkpoint, the state of the job comes first."""
        data = self._epochs()
        if data is not None and _internal_call and output_dir is not None and self.is_in_train:
            # On every rank, because each of them acknowledges its own batch.
            state = data.state_dict()
            if self.args.should_save:
                os.makedirs(output_dir, exist_ok=True)
                path = os.path.join(output_dir, _STATE)
                torch.save(state, f"{path}.new")
                os.replace(f"{path}.new", path)
        super().save_model(output_dir, _internal_call)

    def _epochs(self) -> EpochDataset | None:
        return self.train_dataset if isinstance(self.train_dataset, EpochDataset) else None

    def _complete_checkpoint(self, resume_from_checkpoint: Any) -> str:
        """The folder of a checkpoint that a kill did not cut short.

        For ``True`` it is the latest one of the output directory.
        """
        if resume_from_checkpoint is not True:
            path = os.fspath(resume_from_checkpoint)
            if lacks := _lacks(path):
                raise Invalid(
                    f"the checkpoint {path} has no {' and no '.join(lacks)}, so the state of the job or of "
                    "the trainer is not known: give an earlier checkpoint, or one that an EpochTrainer saved"
                )
            return str(path)
        folder = self.args.output_dir
        found = [os.path.join(folder, name) for name in os.listdir(folder) if name.startswith("checkpoint-")]
        complete = [path for path in found if not _lacks(path)]
        if not complete:
            raise Invalid(
                f"{folder} has no complete checkpoint of an EpochTrainer: to start from the beginning, give "
                "no resume_from_checkpoint and another job name, or delete the job"
            )
        return max(complete, key=lambda path: int(path.rsplit("-", 1)[1]))

    def _require_a_new_job(self, data: EpochDataset) -> None:
        if data._has_begun():
            raise Invalid(
                f"job {data.job} was begun before, and this training starts with a new model, which would "
                "not see the samples that were consumed: give resume_from_checkpoint=True to continue, "
                f"another job name, or delete the job (`fletch jobs delete {data.job}`)"
            )


def _lacks(checkpoint: str) -> list[str]:
    """The files that a complete checkpoint has and this one has not."""
    return [name for name in (_STATE, _LAST) if not os.path.isfile(os.path.join(checkpoint, name))]
