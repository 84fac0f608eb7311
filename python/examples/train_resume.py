"""Trains in one process, and continues where it was after a restart.

    python train_resume.py SERVER DATASET JOB

The checkpoint is JOB.pt. The same command starts the training and continues it, however it ended.
"""

import io, os, sys

import torch
from PIL import Image
from torchvision.transforms import Compose, Resize, ToTensor

import fletch
from fletch.torch import DataLoader, EpochDataset, ImageFolder

EPOCHS, STEPS_PER_CHECKPOINT = 2, 5
server, dataset, job = sys.argv[1:4]
checkpoint = f"{job}.pt"

client = fletch.Client(server, job=job)
classes = ImageFolder(client.resolve(dataset)).class_to_idx
shrink = Compose([Resize((24, 24)), ToTensor()])


def decode(sample):
    image = Image.open(io.BytesIO(sample.content)).convert("RGB")
    return shrink(image), classes[sample.path.split("/")[0]]


saved = torch.load(checkpoint) if os.path.exists(checkpoint) else {}
# With its state at once, the job goes on even if its server of a cluster is lost.
state = saved.get("data")
data = EpochDataset(client, dataset, job=job, batch_size=4, transform=decode, state=state)
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 24 * 24, len(classes)))
adam = torch.optim.Adam(net.parameters(), lr=1e-3)


def save():
    """Saves everything at one step. The file is replaced at once, so a kill leaves the old or the new one."""
    state = {"net": net.state_dict(), "adam": adam.state_dict(), "data": data.state_dict()}
    torch.save(state, f"{checkpoint}.new")
    os.replace(f"{checkpoint}.new", checkpoint)


first = 0
if saved:
    net.load_state_dict(saved["net"])
    adam.load_state_dict(saved["adam"])
    first = state["epoch"] + state["finished"]
    print(f"continues with epoch {first}", flush=True)
else:
    # Before the first step: without a state, a restart would not repeat what the lost net has seen.
    save()

for epoch in range(first, EPOCHS):
    for step, (pixels, labels) in enumerate(DataLoader(data, num_workers=2), 1):
        loss = torch.nn.functional.cross_entropy(net(pixels), labels)
        adam.zero_grad()
        loss.backward()
        adam.step()
        # After the step, before the next batch: the state counts this batch as consumed.
        if step % STEPS_PER_CHECKPOINT == 0:
            save()
            print(f"checkpoint after {step} steps of this run", flush=True)
    stats = data.stats()
    print(f"epoch {epoch}: {stats['samples']} images, receipt {stats['receipt']}", flush=True)
save()
