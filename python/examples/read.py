import sys

import fletch
from fletch.torch import DataLoader, EpochDataset

server, dataset, job = sys.argv[1:]
client = fletch.Client(server, job=job)
sizes = EpochDataset(client, dataset, job=job, batch_size=16, transform=lambda sample: sample.nbytes)
for epoch in range(4):
    read = sum(int(batch.sum()) for batch in DataLoader(sizes, num_workers=0))
    stats = sizes.stats()
    print(f"{job}, epoch {epoch}: {stats['samples']} samples, {read} bytes, receipt {stats['receipt']}")
