"""Trains with the hooks that Lightning's trainer calls, and continues where it was after a restart.

    python train_hooks.py SERVER DATASET JOB

`Pictures` has the methods of a LightningDataModule, and `fit` calls them as Lightning's trainer does: a
pattern for a trainer of your own. For Lightning itself copy `train_lightning.py`. The checkpoint is JOB.pt.
"""

import io, os, sys

import torch
from PIL import Image
from torchvision.transforms import Compose, Resize, ToTensor

import fletch
from fletch.torch import DataLoader, EpochDataset, ImageFolder

EPOCHS, STEPS_PER_CHECKPOINT = 2, 5


class Pictures:
    """The data of a training: a LightningDataModule without its base class."""

    def __init__(self, server, dataset, job):
        self.server, self.dataset, self.job = server, dataset, job

    def setup(self, stage):
        client = fletch.Client(self.server, job=self.job)
        self.classes = ImageFolder(client.resolve(self.dataset)).class_to_idx
        self.shrink = Compose([Resize((24, 24)), ToTensor()])
        self.data = EpochDataset(client, self.dataset, job=self.job, batch_size=4, transform=self.decode)

    def decode(self, sample):
        image = Image.open(io.BytesIO(sample.content)).convert("RGB")
        return self.shrink(image), self.classes[sample.path.split("/")[0]]

    def train_dataloader(self):
        # In this process: a worker would get a copy of the module, with its client.
        return DataLoader(self.data, num_workers=0)

    def state_dict(self):
        return self.data.state_dict()

    def load_state_dict(self, state):
        self.data.load_state_dict(state)
        self.first_epoch = state["epoch"] + state["finished"]


def fit(net, optimizer, module, checkpoint):
    """Calls the hooks of a module in the order in which Lightning's trainer calls them."""
    def save():
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "data": module.state_dict()}
        torch.save(state, f"{checkpoint}.new")
        os.replace(f"{checkpoint}.new", checkpoint)

    first = 0
    if os.path.exists(checkpoint):
        saved = torch.load(checkpoint)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        module.load_state_dict(saved["data"])
        first = module.first_epoch
        print(f"continues with epoch {first}", flush=True)
    else:
        save()
    for epoch in range(first, EPOCHS):
        for step, (pixels, labels) in enumerate(module.train_dataloader(), 1):
            loss = torch.nn.functional.cross_entropy(net(pixels), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % STEPS_PER_CHECKPOINT == 0:
                save()
                print(f"checkpoint after {step} steps of this run", flush=True)
        stats = module.data.stats()
        print(f"epoch {epoch}: {stats['samples']} images, receipt {stats['receipt']}", flush=True)
    save()


server, dataset, job = sys.argv[1:4]
module = Pictures(server, dataset, job)
module.setup("fit")
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 24 * 24, len(module.classes)))
fit(net, torch.optim.Adam(net.parameters(), lr=1e-3), module, f"{job}.pt")
