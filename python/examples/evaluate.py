"""Evaluates a net on every image of a dataset, once each, on one rank or several.

    python evaluate.py SERVER DATASET

Each sub-folder of the dataset is one class. Under `torchrun` every rank evaluates its share.
"""

import io, os, sys

import torch
from PIL import Image
from torchvision.transforms import Compose, Resize, ToTensor

import fletch
from fletch.torch import DataLoader, EvalDataset, ImageFolder

if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    torch.distributed.init_process_group("gloo")
client = fletch.Client(sys.argv[1])
classes = ImageFolder(client.resolve(sys.argv[2])).class_to_idx
shrink = Compose([Resize((24, 24)), ToTensor()])


def decode(sample):
    image = Image.open(io.BytesIO(sample.content)).convert("RGB")
    return shrink(image), classes[sample.path.split("/")[0]], sample.repeated


data = EvalDataset(client, sys.argv[2], transform=decode, pad=True, on_error="skip")
loader = DataLoader(data, batch_size=32, num_workers=2)
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 24 * 24, len(classes))).eval()

next(iter(loader))  # A look at one batch takes nothing from the pass below.
right = images = 0
with torch.no_grad():
    for pixels, labels, repeated in loader:
        hits = net(pixels).argmax(1) == labels
        right += int((hits & ~repeated).sum())
        images += int((~repeated).sum())
counts = torch.tensor([images, right, data.stats()["skipped"]])
if torch.distributed.is_initialized():
    torch.distributed.all_reduce(counts)
if data.rank == 0:
    images, right, skipped = counts.tolist()
    print(f"{images} images of {len(classes)} classes, {right} right, {skipped} skipped")
