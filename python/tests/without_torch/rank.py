"""A rank of a training without PyTorch, which is killed and started again.

    python rank.py SERVER DATASET JOB RANK RANKS FOLDER RUN

FOLDER has what all ranks see: the model (here the keys that it saw), the states, and the meetings.
"""

from __future__ import annotations

import forbid  # isort: skip

import json
import os
import pickle
import sys
import time
from pathlib import Path

import fletch

STEPS_PER_CHECKPOINT = 3
server, dataset, job, number, count, shared, run = sys.argv[1:8]
rank, ranks, folder = int(number), int(count), Path(shared)


def meet(name: str) -> None:
    """Waits until every rank is here."""
    (folder / f"{run}-{name}-{rank}").touch()
    while not all((folder / f"{run}-{name}-{other}").exists() for other in range(ranks)):
        time.sleep(0.002)


#: Names the files of the checkpoint. Rank 0 replaces it once every rank has written its own file.
latest = folder / "latest"
saved = {"seen": []}
if latest.exists():
    saved = pickle.loads((folder / f"{latest.read_text()}-{rank}.checkpoint").read_bytes())
client = fletch.Client(server, job=job)
settings = {"job": job, "batch_size": 4, "rank": rank, "ranks": ranks}
if rank > 0:
    # Rank 0 sends the state to the server. The others begin after that.
    meet("loaded-by-0")
epochs = fletch.Epochs(client, dataset, state=saved.get("data"), **settings)
if rank == 0:
    meet("loaded-by-0")
seen: list[str] = saved["seen"]
log = folder / f"rank-{rank}.log"
if log.exists():
    os.truncate(log, saved.get("log", 0))


def save(step: int) -> None:
    """Saves the model and the position of this rank, at the same step of all ranks."""
    meet(f"step-{step}")
    if rank == 0:
        # After the others, so that its state has the steps of all ranks.
        meet(f"others-{step}")
    state = epochs.state_dict()
    if rank > 0:
        meet(f"others-{step}")
    size = log.stat().st_size if log.exists() else 0
    own = folder / f"{run}-{step}-{rank}.checkpoint"
    own.write_bytes(pickle.dumps({"seen": seen, "data": state, "log": size}))
    meet(f"written-{step}")
    if rank == 0:
        (folder / "latest.new").write_text(f"{run}-{step}")
        (folder / "latest.new").replace(latest)
    meet(f"saved-{step}")


if not saved.get("data"):
    save(0)
with epochs:
    for step, batch in enumerate(epochs.epoch(), 1):
        seen += [sample.key for sample in batch]
        assert all(bytes(sample.content[:4]) == sample.path.encode() for sample in batch)
        epochs.append_consumption_log(log)
        if step % STEPS_PER_CHECKPOINT == 0:
            save(step)
        time.sleep(0.02)
    (folder / f"rank-{rank}.sum").write_bytes(epochs.consumed_sum())
    meet("end")
    others = [(folder / f"rank-{other}.sum").read_bytes() for other in range(ranks) if other != rank]
    agrees, stats = epochs.verify(others), epochs.stats()
frameworks = sorted(set(forbid.FORBIDDEN) & {name.partition(".")[0] for name in sys.modules})
result = {"seen": seen, "agrees": agrees, "receipt": stats["receipt"], "frameworks": frameworks}
(folder / f"rank-{rank}.result").write_text(json.dumps(result))
