"""What the scripts of these tests share: the datasets, a net that counts what it trained, and the kill.

A script is a training or an evaluation as a user writes it with one framework. It runs on one rank or, under
``torchrun``, on several, and prints a line ``RESULT`` or ``REFUSED`` with JSON for each case. The net counts
the samples that it trained in a buffer, which the framework saves and restores with the net. So after a kill
and a restart the buffer says what the net that survived has seen.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any, Callable

import torch
import torch.distributed

import fletch
from fletch.torch import EpochDataset, EvalDataset, MapDataset

SAMPLES, BATCH = 1000, 8
SERVER = sys.argv[1]
CASES: list[dict[str, Any]] = json.loads(sys.argv[2])
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Case:
    """The case that runs now."""

    options: dict[str, Any] = {}
    job = ""


def option(name: str, default: Any = None) -> Any:
    return Case.options.get(name, default)


def run_cases(one: Callable[[], None]) -> None:
    """Runs every case. A case that Fletch refuses is one with a result, too."""
    for case in CASES:
        Case.options, Case.job = case, case["job"]
        try:
            one()
        except Exception as error:
            # Lightning's teardown fails after a refusal, so a user sees the two errors together.
            refusal: BaseException | None = error
            while refusal is not None and not isinstance(refusal, fletch.Invalid):
                refusal = refusal.__context__
            if refusal is None:
                raise
            say("REFUSED", {"job": Case.job, "rank": RANK, "says": str(refusal)})


def say(kind: str, value: Any) -> None:
    """Prints a line in one piece, because the ranks print to the same file."""
    sys.stdout.write(f"{kind} {json.dumps(value)}\n")
    sys.stdout.flush()


def die_at(place: str, count: int) -> None:
    """Kills this process if the test wants that, at the ``count``-th time that a script comes to a place.

    A third word of the kill is the only rank that dies.
    """
    die = option("die")
    if die is not None and die[:2] == [place, count] and die[2:] in ([], [RANK]):
        say("KILLED", die)
        os.kill(os.getpid(), signal.SIGKILL)


def number(sample: Any) -> dict[str, int]:
    """A sample's number, and whether it is more than padding."""
    n = int.from_bytes(sample.content[:4], "little")
    padding = sample.copy is None if hasattr(sample, "copy") else sample.repeated
    return {"x": n, "labels": int(not padding)}


def number_of_view(view: memoryview) -> dict[str, int]:
    return {"x": int.from_bytes(view[:4], "little"), "labels": 1}


def epochs(**settings: Any) -> EpochDataset:
    client = fletch.Client(SERVER, job=Case.job, timeout=20)
    settings = {"batch_size": BATCH, "transform": number, "tail": "pad" if RANKS > 1 else None, **settings}
    return EpochDataset(client, "numbered", job=Case.job, **settings)


def passes(**settings: Any) -> EvalDataset:
    return EvalDataset(fletch.Client(SERVER, timeout=20), "numbered", transform=number, **settings)


def by_index() -> MapDataset:
    return MapDataset(fletch.Client(SERVER, timeout=20).resolve("numbered"), number_of_view)


def gathered(values: list[int]) -> list[int]:
    """The values of all ranks."""
    if not torch.distributed.is_initialized():
        return values
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, values)
    return [value for part in parts for value in part]


class Net(torch.nn.Module):
    """A net that counts the samples that it was trained with, on all ranks together."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.register_buffer("seen", torch.zeros(SAMPLES, dtype=torch.long))
        self.steps = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.steps += 1
            die_at("step", self.steps)
            real = [int(n) for n, is_real in zip(x, labels) if is_real]
            for n in gathered(real):
                self.seen[n] += 1
        y = self.linear(x.float().unsqueeze(1) / SAMPLES)
        return {"loss": (y**2).mean(), "logits": x}


def counted(numbers: list[int]) -> dict[str, int]:
    """How often the samples are in a list: the least, the most, and all together."""
    counts = torch.bincount(torch.tensor(numbers, dtype=torch.long), minlength=SAMPLES)
    return {"least": int(counts.min()), "most": int(counts.max()), "total": int(counts.sum())}


def validated(counts: dict[str, int]) -> dict[str, int]:
    """Prints on rank 0 what a validation counted, because a run that is killed has no result."""
    if RANK == 0:
        say("VALIDATED", counts)
    return counts


def result(net: Net | None = None, **more: Any) -> None:
    """Prints the result of a script, on rank 0."""
    if net is not None:
        seen = net.seen
        more["trained"] = {"least": int(seen.min()), "most": int(seen.max()), "total": int(seen.sum())}
        more["steps"] = net.steps
    if RANK == 0:
        say("RESULT", {"job": Case.job, **more})
