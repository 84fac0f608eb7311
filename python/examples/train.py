import io, os, sys

import torch
from PIL import Image
from torch.nn import Conv2d, Flatten, Linear, ReLU, Sequential
from torchvision.transforms import Compose, Resize, ToTensor

import fletch
from fletch.torch import DataLoader, EpochDataset, ImageFolder

client = fletch.Client(sys.argv[1], job="readme")
classes = ImageFolder(client.resolve(sys.argv[2])).class_to_idx
shrink = Compose([Resize((24, 24)), ToTensor()])


def decode(sample):
    image = Image.open(io.BytesIO(sample.content)).convert("RGB")
    return shrink(image), classes[sample.path.split("/")[0]]


images = EpochDataset(client, sys.argv[2], job=f"readme-{os.getpid()}", batch_size=32, transform=decode)
layers = [Conv2d(3, 16, 5, 2), ReLU(), Conv2d(16, 32, 3, 2), ReLU(), Flatten(), Linear(512, len(classes))]
net = Sequential(*layers)
adam = torch.optim.Adam(net.parameters(), lr=2e-3)
for epoch in range(3):
    losses = []
    for pixels, labels in DataLoader(images, num_workers=2):
        loss = torch.nn.functional.cross_entropy(net(pixels), labels)
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    stats = images.stats()
    loss = sum(losses) / len(losses)
    print(f"epoch {epoch}: {stats['samples']} images of {len(classes)} classes,", end=" ")
    print(f"receipt {stats['receipt']}, loss {loss:.2f}")
