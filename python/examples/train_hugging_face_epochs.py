"""Trains with Hugging Face's Trainer over `fletch.Epochs`, on one rank, and continues after a restart.

    python train_hugging_face_epochs.py SERVER DATASET JOB

Each sub-folder of the dataset is one class. The checkpoints are in the folder JOB.
"""

import glob, io, os, sys

import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import Compose, Resize, ToTensor
from transformers import Trainer, TrainerCallback, TrainingArguments

import fletch
from iterable_dataset import IterableEpochs

server, dataset, job = sys.argv[1:4]
client = fletch.Client(server, job=job)
classes, _ = client.resolve(dataset).labels()
shrink = Compose([Resize((24, 24)), ToTensor()])


def decode(batch):
    """The arguments of `forward` for a list of samples."""
    pixels = [shrink(Image.open(io.BytesIO(sample.content)).convert("RGB")) for sample in batch]
    labels = [classes.index(sample.path.split("/")[0]) for sample in batch]
    return {"pixels": torch.stack(pixels), "labels": torch.tensor(labels)}


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 24 * 24, len(classes)))

    def forward(self, pixels, labels):
        logits = self.net(pixels)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class OneBatchAtATime(Trainer):
    def get_train_dataloader(self):
        # Trainer's own loader asks for a batch ahead. That would acknowledge the batch of the current step.
        return DataLoader(self.train_dataset, batch_size=None, num_workers=0)


def save(path):
    """Saves the position in the epoch. The file is complete or does not exist."""
    torch.save(epochs.state_dict(), f"{path}.new")
    os.replace(f"{path}.new", path)


class SaveEpochs(TrainerCallback):
    def on_save(self, args, state, control, **more):
        # After the step, before the next batch: the state counts the batch of this step as consumed.
        save(f"{job}/checkpoint-{state.global_step}/fletch.pt")
        print(f"checkpoint after {state.global_step} steps", flush=True)

    def on_epoch_end(self, args, state, control, **more):
        epochs.state_dict()  # Trainer asks for no batch after the last one: acknowledge that one.
        stats = epochs.stats()
        print(f"epoch {stats['epoch']}: {stats['samples']} images, receipt {stats['receipt']}", flush=True)


# A checkpoint without a position was cut short by a kill.
begin, saved = f"{job}/begin.pt", glob.glob(f"{job}/checkpoint-*/fletch.pt")
latest = max(map(os.path.dirname, saved), key=lambda folder: int(folder.rpartition("-")[2]), default=None)
position = f"{latest}/fletch.pt" if latest else begin
known = torch.load(position) if os.path.exists(position) else None
epochs = fletch.Epochs(client, dataset, job=job, batch_size=4, state=known)
if known is None:
    # Before the first step: without it, a restart would not repeat what the lost weights have seen.
    os.makedirs(job, exist_ok=True)
    save(begin)
else:
    print(f"continues with epoch {epochs.next_epoch} from {position}", flush=True)

args = TrainingArguments(
    job, num_train_epochs=2, per_device_train_batch_size=4, use_cpu=True, save_strategy="steps", save_steps=5,
    ignore_data_skip=True, report_to=[],  # The server delivers what is left of the epoch: nothing to skip.
)
with epochs:
    data = IterableEpochs(epochs, decode)
    OneBatchAtATime(Classifier(), args, train_dataset=data, callbacks=[SaveEpochs()]).train(latest)
