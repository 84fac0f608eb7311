import sys

import torch
from torch.nn import Conv2d, Flatten, Linear, ReLU, Sequential
from torchvision.transforms import Compose, Resize, ToTensor

import fletch
from fletch.torch import DataLoader, ImageFolder

version = fletch.Client(sys.argv[1], job="readme").resolve(sys.argv[2])
images = ImageFolder(version, transform=Compose([Resize((24, 24)), ToTensor()]))
net = Sequential(Conv2d(3, 16, 5, 2), ReLU(), Conv2d(16, 32, 3, 2), ReLU(), Flatten(), Linear(512, len(images.classes)))
adam = torch.optim.Adam(net.parameters(), lr=2e-3)
batches = DataLoader(images, batch_size=32, shuffle=True, num_workers=2, persistent_workers=True)
for epoch in range(3):
    losses = []
    for pixels, labels in batches:
        loss = torch.nn.functional.cross_entropy(net(pixels), labels)
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    print(f"epoch {epoch}: {len(images)} images of {len(images.classes)} classes, loss {sum(losses) / len(losses):.2f}")
