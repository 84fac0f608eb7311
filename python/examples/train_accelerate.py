"""Trains with Hugging Face Accelerate, and continues where it was after a restart.

    accelerate launch train_accelerate.py SERVER DATASET JOB

The checkpoint is the folder JOB. Fletch divides the samples among the ranks, so its loader is not given to
`prepare`, which would divide them a second time.
"""

import io, os, sys

import torch
from accelerate import Accelerator
from PIL import Image
from torchvision.transforms import Compose, Resize, ToTensor

import fletch
from fletch.torch import DataLoader, EpochDataset, ImageFolder

EPOCHS, STEPS_PER_CHECKPOINT = 2, 5
server, dataset, job = sys.argv[1:4]

accelerator = Accelerator()
client = fletch.Client(server, job=job)
classes = ImageFolder(client.resolve(dataset)).class_to_idx
shrink = Compose([Resize((24, 24)), ToTensor()])


def decode(sample):
    image = Image.open(io.BytesIO(sample.content)).convert("RGB")
    return shrink(image), classes[sample.path.split("/")[0]]


rank, ranks = accelerator.process_index, accelerator.num_processes
data = EpochDataset(client, dataset, job=job, batch_size=4, transform=decode, rank=rank, ranks=ranks)
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 24 * 24, len(classes)))
net, adam = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=1e-3))
# save_state and load_state then call state_dict and load_state_dict of the dataset.
accelerator.register_for_checkpointing(data)


def save():
    data.state_dict()  # every rank says what it consumed
    accelerator.wait_for_everyone()
    accelerator.save_state(job)
    accelerator.wait_for_everyone()


first = 0
if os.path.isdir(job):
    accelerator.load_state(job)
    state = data.state_dict()
    first = state["epoch"] + state["finished"]
    print(f"continues with epoch {first}", flush=True)
else:
    save()

for epoch in range(first, EPOCHS):
    for step, (pixels, labels) in enumerate(DataLoader(data, num_workers=2), 1):
        pixels, labels = pixels.to(accelerator.device), labels.to(accelerator.device)
        loss = torch.nn.functional.cross_entropy(net(pixels), labels)
        adam.zero_grad()
        accelerator.backward(loss)
        adam.step()
        if step % STEPS_PER_CHECKPOINT == 0:
            save()
            accelerator.print(f"checkpoint after {step} steps of this run", flush=True)
    stats = data.stats()
    accelerator.print(f"epoch {epoch}: {stats['samples']} images, receipt {stats['receipt']}", flush=True)
save()
