"""Trains with TensorFlow over a `tf.data.Dataset`, and continues where it was after a restart.

    python train_tf_data.py SERVER DATASET JOB

Each sub-folder of the dataset is one class. The checkpoint is JOB.checkpoint.
"""

import os, pickle, sys

import numpy as np, tensorflow as tf

import fletch

EPOCHS, STEPS_PER_CHECKPOINT, RATE = 2, 5, 0.5
server, dataset, job = sys.argv[1:4]
checkpoint = f"{job}.checkpoint"

client = fletch.Client(server, job=job)
classes, _ = client.resolve(dataset).labels()


def decode(sample):
    return np.bincount(np.frombuffer(sample.content, np.uint8), minlength=256) / max(1, sample.nbytes)


saved = {"weights": np.zeros((256, len(classes)), np.float32), "data": None}
if os.path.exists(checkpoint):
    with open(checkpoint, "rb") as file:
        saved = pickle.load(file)
weights = tf.Variable(saved["weights"])
epochs = fletch.Epochs(client, dataset, job=job, batch_size=4, state=saved["data"])


def batches():
    """The batches of the next epoch as arrays."""
    for batch in epochs.epoch():
        labels = [classes.index(sample.path.split("/")[0]) for sample in batch]
        yield np.stack([decode(sample) for sample in batch]), np.array(labels)


def save():
    with open(f"{checkpoint}.new", "wb") as file:
        pickle.dump({"weights": weights.numpy(), "data": epochs.state_dict()}, file)
    os.replace(f"{checkpoint}.new", checkpoint)


if saved["data"]:
    print(f"continues with epoch {epochs.next_epoch}", flush=True)
else:
    save()

shapes = tf.TensorSpec((None, 256), tf.float32), tf.TensorSpec((None,), tf.int64)
# Each iteration is one epoch. TensorFlow must not ask for batches ahead, neither by .prefetch() nor by
# itself: that would acknowledge batches before their steps.
options = tf.data.Options()
options.experimental_optimization.inject_prefetch = False
data = tf.data.Dataset.from_generator(batches, output_signature=shapes).with_options(options)
with epochs:
    for epoch in range(epochs.next_epoch, EPOCHS):
        for number, (x, y) in enumerate(data, 1):
            with tf.GradientTape() as tape:
                scores = tf.matmul(x, weights)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, scores))
            weights.assign_sub(RATE * tape.gradient(loss, weights))
            if number % STEPS_PER_CHECKPOINT == 0:
                save()
                print(f"checkpoint after {number} steps of this run", flush=True)
        stats = epochs.stats()
        print(f"epoch {epoch}: {stats['samples']} images, receipt {stats['receipt']}", flush=True)
    save()
