"""Trains with Hugging Face Accelerate, evaluates after each epoch, and continues after a restart.

    accelerate launch train_accelerate.py SERVER DATASET JOB

The checkpoint is the folder JOB, or JOB.old if a kill came while JOB was replaced. Fletch divides the samples
among the ranks, so its loaders are not given to `prepare`, which would divide them a second time.
"""

import io, os, shutil, sys

import torch
from accelerate import Accelerator
from PIL import Image
from torchvision.transforms import Compose, Resize, ToTensor

import fletch
from fletch.torch import DataLoader, EpochDataset, EvalDataset, ImageFolder

EPOCHS, STEPS_PER_CHECKPOINT = 2, 5
server, dataset, job = sys.argv[1:4]

accelerator = Accelerator()
client = fletch.Client(server, job=job)
classes = ImageFolder(client.resolve(dataset)).class_to_idx
shrink = Compose([Resize((24, 24)), ToTensor()])


def decode(sample):
    image = Image.open(io.BytesIO(sample.content)).convert("RGB")
    # Only a sample of an evaluation can be one that makes the ranks' counts equal.
    return shrink(image), classes[sample.path.split("/")[0]], getattr(sample, "repeated", False)


rank, ranks = accelerator.process_index, accelerator.num_processes
data = EpochDataset(client, dataset, job=job, batch_size=4, transform=decode, rank=rank, ranks=ranks)
loader = DataLoader(data, num_workers=2)
val = EvalDataset(client, dataset, transform=decode, pad=True, rank=rank, ranks=ranks)
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 24 * 24, len(classes)))
net, adam = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=1e-3))
# save_state and load_state then save and load the state of the loader.
accelerator.register_for_checkpointing(loader)


def save():
    accelerator.save_state(f"{job}.new")  # On every rank: each of them acknowledges its batch.
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(f"{job}.old", ignore_errors=True)
        if os.path.isdir(job):
            os.rename(job, f"{job}.old")
        os.rename(f"{job}.new", job)
    accelerator.wait_for_everyone()


def evaluate():
    net.eval()
    counts = torch.zeros(2, device=accelerator.device)  # images, right ones
    with torch.no_grad():
        for pixels, labels, repeated in DataLoader(val, batch_size=8, num_workers=2):
            new = ~repeated.to(accelerator.device)
            right = net(pixels.to(accelerator.device)).argmax(1) == labels.to(accelerator.device)
            counts += torch.stack([new.sum(), (right & new).sum()])
    images, right = accelerator.reduce(counts).tolist()
    accelerator.print(f"evaluated {images:.0f} images, {right:.0f} right", flush=True)


first = 0
checkpoint = next((folder for folder in (job, f"{job}.old") if os.path.isdir(folder)), None)
if checkpoint:
    accelerator.load_state(checkpoint)
    state = data.state_dict()
    first = state["epoch"] + state["finished"]
    accelerator.print(f"continues with epoch {first}", flush=True)
else:
    save()

for epoch in range(first, EPOCHS):
    net.train()
    for step, (pixels, labels, _) in enumerate(loader, 1):
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
    evaluate()
save()
