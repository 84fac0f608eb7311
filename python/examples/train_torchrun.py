"""Trains on several ranks with torchrun, and continues in the middle of an epoch after a rank was lost.

    torchrun --standalone --nproc_per_node=2 --max_restarts=3 train_torchrun.py SERVER DATASET JOB

When a rank ends, torchrun stops the others and starts all of them again. They load JOB.pt, which has the
net and the position in the epoch at one step. Each rank notes what it consumed in JOB-RANK.log. The notes
go back to the checkpoint with the net, so `fletch receipt verify JOB-*.log` finds every sample once.
"""

import io, os, sys

import torch
import torch.distributed as dist
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from torchvision.transforms import Compose, Resize, ToTensor

import fletch
from fletch.torch import DataLoader, EpochDataset, ImageFolder

EPOCHS, STEPS_PER_CHECKPOINT = 1, 4
server, dataset, job = sys.argv[1:4]
checkpoint = f"{job}.pt"

# Before the dataset, which asks torch.distributed for rank and number of ranks.
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
log = f"{job}-{rank}.log"

client = fletch.Client(server, job=job)
classes = ImageFolder(client.resolve(dataset)).class_to_idx
shrink = Compose([Resize((24, 24)), ToTensor()])


def decode(sample):
    image = Image.open(io.BytesIO(sample.content)).convert("RGB")
    return shrink(image), classes[sample.path.split("/")[0]]


saved = torch.load(checkpoint) if os.path.exists(checkpoint) else {}
# With its state at once, the job goes on even if its server of a cluster is lost. Rank 0 sends the state to
# the server, and the other ranks wait for that.
state = saved.get("data")
data = EpochDataset(client, dataset, job=job, batch_size=2, transform=decode, state=state)
plain = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 24 * 24, len(classes)))
net = DistributedDataParallel(plain)
adam = torch.optim.Adam(net.parameters(), lr=1e-3)


def save():
    """Saves everything at one step of all ranks."""
    data.state_dict()  # every rank says what it consumed ...
    sizes = [0] * ranks
    dist.all_gather_object(sizes, os.path.getsize(log) if os.path.exists(log) else 0)
    if rank == 0:  # ... and one rank keeps the sum of all
        state = {"net": plain.state_dict(), "adam": adam.state_dict(), "data": data.state_dict()}
        torch.save({**state, "logs": sizes}, f"{checkpoint}.new")
        os.replace(f"{checkpoint}.new", checkpoint)
    dist.barrier()


first = 0
if saved:
    plain.load_state_dict(saved["net"])
    adam.load_state_dict(saved["adam"])
    if os.path.exists(log):
        os.truncate(log, saved["logs"][rank])
    first = state["epoch"] + state["finished"]
    print(f"rank {rank} continues with epoch {first}", flush=True)
else:
    save()

for epoch in range(first, EPOCHS):
    for step, (pixels, labels) in enumerate(DataLoader(data, num_workers=1), 1):
        loss = torch.nn.functional.cross_entropy(net(pixels), labels)
        adam.zero_grad()
        loss.backward()
        adam.step()
        data.append_consumption_log(log)
        if step % STEPS_PER_CHECKPOINT == 0:
            save()
            if rank == 0:
                print(f"checkpoint after {step} steps of this run", flush=True)
    print(f"rank {rank}, epoch {epoch}: finished", flush=True)
save()
dist.destroy_process_group()
