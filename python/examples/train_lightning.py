"""Trains with Lightning, validates after each epoch, and continues after a restart.

    python train_lightning.py SERVER DATASET JOB

Under `torchrun` every rank trains and validates its share. Each sub-folder of the dataset is one class. The
checkpoints are in the folder JOB. Lightning saves the state of the loader in them.
"""

import glob, io, os, sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image
from torchvision.transforms import Compose, Resize, ToTensor

import fletch
from fletch.torch import DataLoader, EpochDataset, EvalDataset, ImageFolder

EPOCHS, STEPS_PER_CHECKPOINT = 2, 5
server, dataset, job = sys.argv[1:4]
client = fletch.Client(server, job=job)
classes = ImageFolder(client.resolve(dataset)).class_to_idx
shrink = Compose([Resize((24, 24)), ToTensor()])


def decode(sample):
    image = Image.open(io.BytesIO(sample.content)).convert("RGB")
    return shrink(image), classes[sample.path.split("/")[0]]


class Pictures(lightning.LightningDataModule):
    def setup(self, stage):
        # Here and not earlier: the process group exists now, so the datasets know their rank.
        self.train = EpochDataset(client, dataset, job=job, batch_size=4, transform=decode)
        self.val = EvalDataset(client, dataset, transform=decode)

    def train_dataloader(self):
        return DataLoader(self.train, num_workers=2)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=8, num_workers=2)


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 24 * 24, len(classes)))
        self.validated = 0

    def training_step(self, batch, index):
        pixels, labels = batch
        return torch.nn.functional.cross_entropy(self.net(pixels), labels)

    def on_train_batch_end(self, outputs, batch, index):
        if self.global_step % STEPS_PER_CHECKPOINT == 1 and self.global_step > 1:
            print(f"checkpoint after {self.global_step - 1} steps", flush=True)

    def on_validation_epoch_start(self):
        self.validated = 0

    def validation_step(self, batch, index):
        self.validated += len(batch[1])

    def on_validation_epoch_end(self):
        print(f"rank {self.global_rank} validated {self.validated} images", flush=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


pictures = Pictures()
trainer = lightning.Trainer(
    max_epochs=EPOCHS, accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")),
    logger=False, enable_progress_bar=False,
    callbacks=[ModelCheckpoint(job, every_n_train_steps=STEPS_PER_CHECKPOINT, save_top_k=-1)],
)
latest = max(glob.glob(f"{job}/*.ckpt"), key=os.path.getmtime, default=None)
if latest:
    print(f"continues from {latest}", flush=True)
trainer.fit(Classifier(), datamodule=pictures, ckpt_path=latest)

pictures.train.state_dict()  # Lightning asks for no batch after the last one: acknowledge that one.
stats = pictures.train.stats()
print(f"epoch {stats['epoch']}: {stats['samples']} images, receipt {stats['receipt']}", flush=True)
