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
decode = lambda s: (shrink(Image.open(io.BytesIO(s.content)).convert("RGB")), classes[s.path.split("/")[0]])
images = EpochDataset(client, sys.argv[2], job=f"readme-{os.getpid()}", batch_size=32, transform=decode)
net = Sequential(Conv2d(3, 16, 5, 2), ReLU(), Conv2d(16, 32, 3, 2), ReLU(), Flatten(), Linear(512, len(classes)))
adam = torch.optim.Adam(net.parameters(), lr=2e-3)
for epoch in range(3):
    losses = []
    for pixels, labels in DataLoader(images, num_workers=2):
        loss = torch.nn.functional.cross_entropy(net(pixels), labels)
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    told = images.stats()
    print(f"epoch {epoch}: {told['samples']} images of {len(classes)} classes, receipt {told['receipt']}, loss {sum(losses) / len(losses):.2f}")
