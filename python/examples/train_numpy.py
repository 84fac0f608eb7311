"""Trains with numpy alone, and continues where it was after a restart.

    python train_numpy.py SERVER DATASET JOB

Each sub-folder of the dataset is one class. The checkpoint is JOB.checkpoint. The same command starts the
training and continues it, however it ended.
"""

import os, pickle, sys

import numpy as np

import fletch

EPOCHS, STEPS_PER_CHECKPOINT, RATE = 2, 5, 0.5
server, dataset, job = sys.argv[1:4]
checkpoint = f"{job}.checkpoint"

client = fletch.Client(server, token_file=os.environ.get("FLETCH_TOKEN_FILE"), job=job)
classes, _ = client.resolve(dataset).labels()


def decode(sample):
    """The share of each byte value in a file: an input that needs no decoder of images."""
    return np.bincount(np.frombuffer(sample.content, np.uint8), minlength=256) / max(1, sample.nbytes)


def label(sample):
    return classes.index(sample.path.split("/")[0])


def step(weights, x, y):
    """A step of gradient descent of a linear classifier. Returns the new weights."""
    scores = np.exp(x @ weights)
    chances = scores / scores.sum(axis=1, keepdims=True)
    chances[np.arange(len(y)), y] -= 1
    return weights - RATE * x.T @ chances / len(y)


saved = {"weights": np.zeros((256, len(classes))), "data": None}
if os.path.exists(checkpoint):
    with open(checkpoint, "rb") as file:
        saved = pickle.load(file)
weights = saved["weights"]
epochs = fletch.Epochs(client, dataset, job=job, batch_size=4, state=saved["data"])


def save():
    """Saves everything at one step. The file is replaced at once, so a kill leaves the old or the new one."""
    with open(f"{checkpoint}.new", "wb") as file:
        pickle.dump({"weights": weights, "data": epochs.state_dict()}, file)
    os.replace(f"{checkpoint}.new", checkpoint)


if saved["data"]:
    print(f"continues with epoch {epochs.next_epoch}", flush=True)
else:
    # Before the first step: without a state, a restart would not repeat what the lost weights have seen.
    save()

with epochs:
    for epoch in range(epochs.next_epoch, EPOCHS):
        for number, batch in enumerate(epochs.epoch(epoch), 1):
            x = np.stack([decode(sample) for sample in batch])
            y = np.array([label(sample) for sample in batch])
            weights = step(weights, x, y)
            # After the step, before the next batch: the state counts this batch as consumed.
            if number % STEPS_PER_CHECKPOINT == 0:
                save()
                print(f"checkpoint after {number} steps of this run", flush=True)
        stats = epochs.stats()
        print(f"epoch {epoch}: {stats['samples']} images, receipt {stats['receipt']}", flush=True)
    save()
