"""Wrappers of loaders that would deliver a part of a dataset: recognises them, and says what to write.

A framework takes the dataset of a loader and builds a loader of its own, which gives each process a part,
skips batches, or counts them. The samples of this package are divided among the ranks already, and the server
counts them. So such a loader would leave samples out, and say nothing.

Frameworks are recognised by the names of their classes on the stack of the process that begins an iteration
or that sends a dataset to workers. None of them is imported.

Invariant: a dataset is refused before a sample is requested, so a refusal consumes nothing.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Callable, Iterator, NamedTuple

from .. import Invalid

#: Classes that give each process a part of what the dataset yields.
_SHARDERS = frozenset(("IterableDatasetShard", "DataLoaderDispatcher"))
#: Classes that can leave out the first batches.
_SKIPPERS = frozenset(("DataLoaderShard", "DataLoaderDispatcher", "SkipDataLoader"))
#: Loaders that save the state of a dataset by rules of their own.
_STATEFUL = frozenset(("StatefulDataLoader",))
#: The loops of Lightning's trainer and the trainer of transformers.
_LIGHTNING, _TRAINER = "_FitLoop", "Trainer"
#: The iterator of torch's loader.
_TORCHS = "_BaseDataLoaderIter"
#: The loop of Lightning that counts the batches of an epoch.
_COUNTER = "_TrainingEpochLoop"

_OF_TRAINER = (
    "with transformers.Trainer use fletch.torch.hugging_face.EpochTrainer "
    "(docs/howto/hugging-face-trainer.md)"
)
_OF_ACCELERATE = (
    "with Accelerate iterate fletch.torch.DataLoader(dataset) itself and do not give it to prepare() "
    "(docs/howto/accelerate.md)"
)
_OF_STATES = "save dataset.state_dict() with the model and call dataset.load_state_dict() after a restart"


class _Caller(NamedTuple):
    """A method on the stack: the names of its object's classes, the object, and the frame."""

    names: frozenset[str]
    object: Any
    frame: FrameType


def _callers() -> Iterator[_Caller]:
    """The methods on the stack, from the innermost one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            found = frame.f_locals.get("self")
            yield _Caller(frozenset(base.__name__ for base in type(found).__mro__), found, frame)
        frame = frame.f_back


class RebuiltLoader:
    """The ``collate_fn`` that a loader over epochs shows to others.

    The batches of such a loader are leases, and its workers make them. A framework that builds another loader
    of the dataset and this ``collate_fn`` would get single samples in place of batches.
    """

    def __call__(self, _item: Any) -> Any:
        raise Invalid(self.refusal("another loader"))

    @staticmethod
    def refusal(wrapper: str) -> str:
        """The text that says that a wrapper has built another loader."""
        return (
            f"{wrapper} was built of the dataset of a fletch.torch.DataLoader over an EpochDataset, whose "
            f"batches only that loader makes: {_OF_ACCELERATE}; {_OF_TRAINER}"
        )


def refuse_wrappers_of_epochs(job: str, rank: int, ranks: int) -> None:
    """Raises `Invalid` if a wrapper that leaves out samples iterates an `EpochDataset`."""
    rebuilt, outermost = False, "a loader"
    for names, found, frame in _callers():
        if isinstance(frame.f_locals.get("collate_fn"), RebuiltLoader):
            rebuilt = True
        if "DataLoader" in names or names & (_SHARDERS | _SKIPPERS):
            outermost = type(found).__name__
        sharder = names & _SHARDERS
        if sharder and (ranks > 1 or _processes(found) > 1):
            raise Invalid(
                f"{min(sharder)} would give each process a part of job {job}, and this dataset is rank "
                f"{rank} of {ranks}, so samples would be left out: {_OF_TRAINER}; {_OF_ACCELERATE}"
            )
        if names & _SKIPPERS and getattr(found, "skip_batches", 0) > 0:
            raise Invalid(
                f"{type(found).__name__} skips {found.skip_batches} batches of job {job}, which never comes "
                f"back to samples that were consumed, so unseen ones would be left out: {_OF_STATES}; "
                f"{_OF_TRAINER}"
            )
        if names & _STATEFUL:
            raise Invalid(
                f"StatefulDataLoader saves the state of a copy of job {job} in a worker, or none: give the "
                "EpochDataset to fletch.torch.DataLoader, which has state_dict() and load_state_dict()"
            )
    if rebuilt:
        raise Invalid(RebuiltLoader.refusal(outermost))


def refuse_resumes_without_state(
    job: str, is_first: Callable[[], bool], was_begun: Callable[[int | None], bool]
) -> None:
    """Raises `Invalid` if a trainer goes on with a begun job, and no state of the job was loaded.

    The job goes on after the last sample that the lost process consumed. A restored model has not seen the
    samples between its checkpoint and that one, and a new model has seen none. Accelerate does not say
    whether a script continues, so its loader may not begin with a begun job.

    Args:
        job: the job's name.
        is_first: whether no iteration of the dataset began before, and nobody chose its epoch.
        was_begun: whether samples of the job were consumed before an iteration of torch's loader, which has
            this base seed if it has workers. Called only if a trainer may continue.
    """
    trainer = hint = ""
    may_go_on, seed = True, None
    for names, found, frame in _callers():
        if _TORCHS in names and seed is None:
            # Also in a worker that was forked: its stack begins with its parent's.
            seed = getattr(found, "_base_seed", None)
        if _LIGHTNING in names and getattr(found, "restarting", False):
            trainer, may_go_on = "Lightning's Trainer", False
            hint = "give it fletch.torch.DataLoader(dataset), whose state it saves in its checkpoints"
        elif _TRAINER in names and frame.f_locals.get("resume_from_checkpoint"):
            trainer, hint, may_go_on = "Trainer", _OF_TRAINER, False
        elif names & _SKIPPERS:
            trainer = "Accelerate"
            hint = f"{_OF_ACCELERATE}, and call register_for_checkpointing(loader); {_OF_TRAINER}"
    if trainer and not (may_go_on and not is_first()) and was_begun(seed):
        raise Invalid(
            f"{trainer} goes on with job {job}, which was begun, without a state of the job, so the model "
            f"would never see samples that were consumed: {hint}; or start again with another job name, or "
            f"delete the job (`fletch jobs delete {job}`)"
        )


def state_that_lightning_keeps(job: str) -> dict[str, Any] | None:
    """The state of the job in Lightning's checkpoint, if Lightning does not load it itself.

    Lightning loads no state of a loader from a checkpoint that it saved at the end of an epoch.
    """
    for names, found, _ in _callers():
        if _LIGHTNING in names and not getattr(found, "restarting", False):
            states = getattr(found, "_combined_loader_states_to_load", [])
            return next((one for one in states if isinstance(one, dict) and one.get("job") == job), None)
    return None


def refuse_repeated_batches(job: str) -> None:
    """Raises `Invalid` if Lightning wants the same batches in every epoch."""
    for names, found, _ in _callers():
        if _LIGHTNING in names and getattr(getattr(found, "trainer", None), "overfit_batches", 0) > 0:
            raise Invalid(
                f"overfit_batches repeats the first batches in every epoch, and job {job} goes on with new "
                "ones: give Lightning a loader over a MapDataset, or EpochDataset(..., select=) and no "
                "overfit_batches"
            )


def is_begun_after_a_step() -> bool:
    """Whether the loop that begins an iteration has made its step with the batch in hand.

    Lightning counts batches (``limit_train_batches``), and asks for none after the last one of its epoch.
    """
    return any(_COUNTER in names for names, _, _ in _callers())


def refuse_sharders_of_passes(rank: int, ranks: int, samples: int) -> None:
    """Raises `Invalid` if a wrapper would evaluate a part of the samples of an `EvalDataset`, or some twice.

    A wrapper that divides a rank's part would leave out samples. One that divides the whole pass by items
    repeats samples to fill its last batch, and Accelerate does not remove them from metrics.

    Args:
        rank, ranks: those of the dataset.
        samples: its length.
    """
    for names, found, _ in _callers():
        sharder = names & _SHARDERS
        if sharder and ranks > 1:
            raise Invalid(
                f"{min(sharder)} shards an EvalDataset that is rank {rank} of {ranks}, so a part of the "
                "samples would be evaluated: give the wrapper EvalDataset(..., rank=0, ranks=1) on every "
                "process, or a MapDataset, or do not wrap the loader"
            )
        processes, batch = _processes(found) if sharder else 1, getattr(found, "batch_size", None)
        if "IterableDatasetShard" not in names or processes == 1 or not isinstance(batch, int):
            continue
        step = batch if getattr(found, "split_batches", False) else batch * processes
        if samples % step:
            raise Invalid(
                f"IterableDatasetShard fills the last batch of {step} samples of all processes with repeated "
                f"ones, or drops it, because {samples} is no multiple of {step}: give the wrapper a "
                "MapDataset, or dispatch_batches=True, or do not wrap the loader"
            )


def _processes(wrapper: Any) -> int:
    """The number of processes to which a wrapper gives parts."""
    own = getattr(wrapper, "num_processes", None)
    return int(own if own is not None else getattr(getattr(wrapper, "state", None), "num_processes", 1))
