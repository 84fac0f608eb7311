"""Trains one member of a sweep. The server chooses the order, so that all members share what it fetched."""

import io
import os

import torch
from PIL import Image
from torchvision.transforms import Compose, Resize, ToTensor

import fletch
from fletch.torch import DataLoader, EpochDataset, ImageFolder

job, dataset = os.environ["JOB"], os.environ["DATASET"]
client = fletch.Client(os.environ["SERVER"], token_file=os.environ.get("TOKEN_FILE"), job=job)
classes = ImageFolder(client.resolve(dataset)).class_to_idx
shrink = Compose([Resize((64, 64)), ToTensor()])
device = "cuda" if torch.cuda.is_available() else "cpu"


def decode(sample):
    image = Image.open(io.BytesIO(sample.content)).convert("RGB")
    return shrink(image), classes[sample.path.split("/")[0]]


samples = EpochDataset(client, dataset, job=job, batch_size=64, transform=decode)
net = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 5, 2),
    torch.nn.ReLU(),
    torch.nn.Flatten(),
    torch.nn.Linear(16 * 30 * 30, len(classes)),
).to(device)
adam = torch.optim.Adam(net.parameters(), lr=float(os.environ["RATE"]))
for epoch in range(int(os.environ["EPOCHS"])):
    total = 0.0
    for pixels, labels in DataLoader(samples, num_workers=int(os.environ["WORKERS"])):
        loss = torch.nn.functional.cross_entropy(net(pixels.to(device)), labels.to(device))
        adam.zero_grad()
        loss.backward()
        adam.step()
        total += loss.item() * len(labels)
    stats = samples.stats()
    mean = total / stats["samples"]
    print(f"{job}, epoch {epoch}: {stats['samples']} samples, receipt {stats['receipt']}, loss {mean:.3f}")
