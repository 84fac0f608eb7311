"""How far a job is: which epoch follows, what was consumed before this run began, and what is left.

Invariant: all ranks of a run have the same `EarlierProgress`, which no rank of the run has changed.
"""

from __future__ import annotations

import json
import logging
from typing import Any, NamedTuple, Sequence

from .. import Invalid
from .ranks import first_value, run_together

_log = logging.getLogger("fletch")


def next_epoch(epochs: Sequence[dict[str, Any]]) -> int:
    """The number of the first epoch that a job has not finished, by the epochs that the server remembers."""
    open_ones = [e["epoch"] for e in epochs if e["state"] != "finished"]
    latest = max((e["epoch"] for e in epochs), default=-1)
    return int(latest if latest in open_ones else latest + 1)


def epoch_of(info: dict[str, Any], epoch: int) -> dict[str, Any] | None:
    """The server's description of an epoch, if it has begun and the server remembers it."""
    return next((e for e in info["epochs"] if e["epoch"] == epoch), None)


class EarlierProgress(NamedTuple):
    """The samples of a job that were consumed before this run, by epoch."""

    acked: dict[int, int]

    @classmethod
    def of(cls, job: str, ranks: int, info: dict[str, Any]) -> EarlierProgress:
        """The progress when the first rank of this run made its dataset.

        A rank that is later may find samples that other ranks of the run have consumed since then.
        """
        acked = {e["epoch"]: e["acked"] for e in info["epochs"] if e["acked"] > 0}
        if run_together(ranks):
            agreed = json.loads(first_value(job, json.dumps(acked)))
            acked = {int(key): count for key, count in agreed.items()}
        return cls(acked)

    @property
    def is_begun(self) -> bool:
        """Whether a sample of the job was consumed."""
        return bool(self.acked)


def report_rest(job: str, epoch: int, left: int, samples: int) -> None:
    """Logs that a job goes on within an epoch though no state was loaded."""
    _log.warning(
        "job %s goes on in epoch %d with %d of %d samples left, and no state was loaded: a new model does "
        "not see the other %d in this epoch; call load_state_dict() with the model's state, or begin anew "
        "with another job name",
        job, epoch, left, samples, samples - left,
    )


def refuse_finished_epoch(job: str, epoch: int, epochs: Sequence[dict[str, Any]], go_on: str) -> None:
    """Raises `Invalid` if the job has finished the epoch. Else it logs that other ranks consume the rest.

    Args:
        job: the job's name.
        epoch: the epoch's number.
        epochs: the epochs that the server remembers.
        go_on: what the program does to read the next epoch.
    """
    if not any(e["epoch"] == epoch and e["state"] == "finished" for e in epochs):
        _log.warning(
            "job %s, epoch %d gave this rank no batch: its share was consumed before this process began",
            job, epoch,
        )
        return
    hint = (
        f"to train on, {go_on} (now {next_epoch(epochs)}); to restore a model, "
        "call load_state_dict() with its state; to start from the beginning, give another job name, or "
        f"delete the job (`fletch jobs delete {job}`)"
    )
    raise Invalid(
        f"job {job}, epoch {epoch} was finished before, so it has no batch: {hint}", "epoch_closed", hint
    )
