"""Trains with JAX, on one process or several, and continues where it was after a restart.

    python train_jax.py SERVER DATASET JOB

Each sub-folder of the dataset is one class. The checkpoint is JOB.checkpoint, in a folder that all processes
see. Process 0 writes it.
"""

import os, pickle, sys

import jax, jax.numpy as jnp, numpy as np
from jax.experimental.multihost_utils import sync_global_devices

import fletch

EPOCHS, STEPS_PER_CHECKPOINT, RATE = 2, 5, 0.5
server, dataset, job = sys.argv[1:4]
# On several hosts, call jax.distributed.initialize() first.
rank, ranks = jax.process_index(), jax.process_count()
checkpoint = f"{job}.checkpoint"

client = fletch.Client(server, job=job)
classes, _ = client.resolve(dataset).labels()


def decode(sample):
    return np.bincount(np.frombuffer(sample.content, np.uint8), minlength=256) / max(1, sample.nbytes)


def loss(weights, x, y):
    chances = jax.nn.log_softmax(x @ weights)
    return -jnp.mean(chances[jnp.arange(len(y)), y])


@jax.jit
def step(weights, x, y):
    return weights - RATE * jax.grad(loss)(weights, x, y)


saved = {"weights": np.zeros((256, len(classes)), np.float32), "data": None}
if os.path.exists(checkpoint):
    with open(checkpoint, "rb") as file:
        saved = pickle.load(file)
weights = jnp.asarray(saved["weights"])
# Every batch has the same shape, so that `step` is compiled once.
settings = {"job": job, "batch_size": 4, "tail": "pad", "rank": rank, "ranks": ranks}
if rank > 0:
    sync_global_devices("rank 0 has loaded its state")
epochs = fletch.Epochs(client, dataset, state=saved["data"], **settings)
if rank == 0:
    sync_global_devices("rank 0 has loaded its state")


def save():
    """Saves the model and the position. All processes call it at the same step."""
    epochs.state_dict()
    sync_global_devices("the server knows what every process consumed")
    if rank == 0:
        # Now the state of rank 0 has the steps of all ranks.
        with open(f"{checkpoint}.new", "wb") as file:
            pickle.dump({"weights": np.asarray(weights), "data": epochs.state_dict()}, file)
        os.replace(f"{checkpoint}.new", checkpoint)
    sync_global_devices("the checkpoint is written")


if saved["data"]:
    print(f"continues with epoch {epochs.next_epoch}", flush=True)
else:
    save()

with epochs:
    for epoch in range(epochs.next_epoch, EPOCHS):
        for number, batch in enumerate(epochs.epoch(epoch), 1):
            x = np.stack([decode(sample) for sample in batch])
            y = np.array([classes.index(sample.path.split("/")[0]) for sample in batch])
            weights = step(weights, x, y)
            if number % STEPS_PER_CHECKPOINT == 0:
                save()
                print(f"checkpoint after {number} steps of this run", flush=True)
        stats = epochs.stats()
        print(f"epoch {epoch}: {stats['samples']} images, receipt {stats['receipt']}", flush=True)
    save()
