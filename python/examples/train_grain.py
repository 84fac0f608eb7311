"""Reads through Grain, whose iterators have states, and continues where it was after a restart.

    python train_grain.py SERVER DATASET JOB

The checkpoint is JOB.checkpoint.
"""

import os, pickle, sys

import grain, numpy as np

import fletch

EPOCHS, STEPS_PER_CHECKPOINT = 2, 5
server, dataset, job = sys.argv[1:4]
checkpoint = f"{job}.checkpoint"


class EpochsOfFletch(grain.IterDataset):
    """The next epoch of a job: lists of samples. Each iterator is one epoch, or the rest of one."""

    def __init__(self, epochs):
        super().__init__()
        self.epochs = epochs

    def __iter__(self):
        return BatchesOfFletch(self.epochs)


class BatchesOfFletch(grain.DatasetIterator):
    def __init__(self, epochs):
        super().__init__()
        self.epochs, self.batches = epochs, None

    def __next__(self):
        if self.batches is None:
            self.batches = self.epochs.epoch()
        return next(self.batches)

    def get_state(self):
        return {"fletch": self.epochs.state_dict()}

    def set_state(self, state):
        self.epochs.load_state_dict(state["fletch"])
        self.batches = None


def histogram(batch):
    return sum(np.bincount(np.frombuffer(sample.content, np.uint8), minlength=256) for sample in batch)


client = fletch.Client(server, job=job)
epochs = fletch.Epochs(client, dataset, job=job, batch_size=4)
data = EpochsOfFletch(epochs).map(histogram)
iterator, total = iter(data), np.zeros(256, np.int64)


def save():
    with open(f"{checkpoint}.new", "wb") as file:
        pickle.dump({"total": total, "data": iterator.get_state()}, file)
    os.replace(f"{checkpoint}.new", checkpoint)


if os.path.exists(checkpoint):
    with open(checkpoint, "rb") as file:
        saved = pickle.load(file)
    total = saved["total"]
    iterator.set_state(saved["data"])
    print(f"continues with epoch {epochs.next_epoch}", flush=True)
else:
    save()

with epochs:
    for epoch in range(epochs.next_epoch, EPOCHS):
        for number, counts in enumerate(iterator, 1):
            total = total + counts
            if number % STEPS_PER_CHECKPOINT == 0:
                save()
                print(f"checkpoint after {number} steps of this run", flush=True)
        stats = epochs.stats()
        print(f"epoch {epoch}: {stats['samples']} images, receipt {stats['receipt']}", flush=True)
        save()
        iterator = iter(data)
