"""Hugging Face's trainer over an epoch dataset. Needs ``transformers``.

Invariants:
    1. A checkpoint of the trainer has the state of the job at its step, with the steps of all ranks. It is
       written before the trainer writes anything else of the checkpoint.
    2. A training that continues loads the state of the checkpoint from which the model comes. A training with
       a new model begins with a job of which nothing was consumed, or that it rolls back to its beginning.
"""

from __future__ import annotations

import os
import re
from typing import Any

import torch
import torch.distributed
import torch.utils.data
from transformers import Trainer

from .. import Invalid
from ..epochs.ranks import run_together
from .epochs import EpochDataset
from .loader import DataLoader

#: The file of a checkpoint with the job's state, and the one that the trainer writes last.
_STATE, _LAST = "fletch.pt", "trainer_state.json"
#: The file of an output directory with the state before the first step.
_BEGIN = "fletch-begin.pt"


class EpochTrainer(Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` whose ``train_dataset`` is an `EpochDataset`.

    Each rank trains its share of the job, and each sample exactly once. Checkpoints have the job's state in
    ``fletch.pt``, and ``train(resume_from_checkpoint=…)`` continues from it, also after a kill. The number of
    ranks stays, because `Trainer` counts epochs in steps. It sets ``ignore_data_skip``: the server delivers
    what is left of the epoch, so there is nothing to skip.

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
        # Torch before 2.0 takes no None.
        ahead = args.dataloader_prefetch_factor
        return DataLoader(
            data,
            num_workers=args.dataloader_num_workers,
            collate_fn=self.data_collator,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            **({} if ahead is None else {"prefetch_factor": ahead}),
        )

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains as `Trainer.train` does.

        With ``resume_from_checkpoint=True`` it continues from the latest complete checkpoint of the output
        directory. If there is none, it begins, also where a process was killed before its first checkpoint.

        Raises:
            Invalid: the given checkpoint is not complete or has no state of the job. Or the job was begun
                before, and nothing says how to continue.
        """
        data = self._epochs()
        if data is not None:
            self.args.ignore_data_skip = True
            resume_from_checkpoint, state = self._agreed_start(data, resume_from_checkpoint)
            if state is not None:
                data.load_state_dict(state)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        """Saves as `Trainer.save_model` does. In a checkpoint, the state of the job comes first."""
        data = self._epochs()
        if data is not None and _internal_call and output_dir is not None and self.is_in_train:
            # On every rank, because each of them acknowledges its own batch.
            state = data.state_dict()
            if self.args.should_save:
                _save(state, output_dir, _STATE)
        super().save_model(output_dir, _internal_call)

    def _epochs(self) -> EpochDataset | None:
        return self.train_dataset if isinstance(self.train_dataset, EpochDataset) else None

    def _agreed_start(self, data: EpochDataset, resume: Any) -> tuple[str | None, dict[str, Any] | None]:
        """The checkpoint and the state with which all ranks begin, as rank 0 finds them."""
        found: list[Any] = [None, None, None]
        if data.rank == 0:
            try:
                found[:2] = self._start(data, resume)
            except Invalid as error:
                found[2] = str(error)
        if run_together(data.ranks):
            torch.distributed.broadcast_object_list(found, src=0)
        checkpoint, state, refusal = found
        if refusal is not None:
            raise Invalid(refusal)
        return checkpoint, state

    def _start(self, data: EpochDataset, resume: Any) -> tuple[str | None, dict[str, Any] | None]:
        if resume and resume is not True:
            path = os.fspath(resume)
            if lacks := _lacks(path):
                raise Invalid(
                    f"the checkpoint {path} has no {' and no '.join(lacks)}, so the state of the job or of "
                    "the trainer is not known: give an earlier checkpoint, or one that an EpochTrainer saved"
                )
            return str(path), _state_of(path, data)
        folder = self.args.output_dir
        if resume and (path := _latest_checkpoint(folder)) is not None:
            return path, _state_of(path, data)
        if not data._has_begun():
            _save(data.state_dict(), folder, _BEGIN)
            return None, None
        if resume and os.path.isfile(os.path.join(folder, _BEGIN)):
            begin = _load(folder, _BEGIN)
            if begin["job"] == data.job:
                return None, begin
        raise Invalid(
            f"job {data.job} was begun before, and this training starts with a new model, which would not "
            "see the samples that were consumed: give resume_from_checkpoint=True to continue, another job "
            f"name, or delete the job (`fletch jobs delete {data.job}`)"
        )


def _latest_checkpoint(folder: str) -> str | None:
    """The latest checkpoint that a kill did not cut short."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    numbers = [int(name[len("checkpoint-") :]) for name in names if re.fullmatch(r"checkpoint-\d+", name)]
    paths = [os.path.join(folder, f"checkpoint-{number}") for number in sorted(numbers, reverse=True)]
    return next((path for path in paths if not _lacks(path)), None)


def _save(state: dict[str, Any], folder: str, name: str) -> None:
    """Writes a state. The file is complete or does not exist."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, name)
    with open(f"{path}.new", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)


def _state_of(checkpoint: str, data: EpochDataset) -> dict[str, Any]:
    """The state of a checkpoint.

    Raises:
        Invalid: another number of ranks saved it.
    """
    state = _load(checkpoint, _STATE)
    if (ranks := state["ranks"][1]) != data.ranks:
        raise Invalid(
            f"the checkpoint {checkpoint} was saved on {ranks} ranks, and there are {data.ranks} now: "
            "Trainer counts epochs in steps, whose number differs; continue with the same number of ranks"
        )
    return state


def _load(folder: str, name: str) -> dict[str, Any]:
    return torch.load(os.path.join(folder, name))  # type: ignore[no-any-return]


def _lacks(checkpoint: str) -> list[str]:
    """The files that a complete checkpoint has and this one has not."""
    return [name for name in (_STATE, _LAST) if not os.path.isfile(os.path.join(checkpoint, name))]
