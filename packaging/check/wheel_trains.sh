# The wheel with PyTorch in an empty root: an epoch through the loader, with a receipt.
. /pkg/common.sh
make_data
tar -C /usr/local --strip-components=1 -xzf /pkg/fletch-*-linux.tar.gz
fletch-server --listen 127.0.0.1:7380 --socket none --state-dir /tmp/state --cache-dir /tmp/cache \
    --cache-size 64MiB 2> /tmp/server.log &
export FLETCH_SERVER=http://127.0.0.1:7380
wait_for 20 fletch status
fletch index /data/photos
fletch register photos /data/photos
python3 -m venv --system-site-packages /opt/train
listing > /tmp/before
/opt/train/bin/pip install --no-deps --no-index --quiet /pkg/fletch-*.whl
cat > /tmp/train.py << 'P'
import fletch, torch
from fletch.torch import DataLoader, EpochDataset

CLASSES = ["cat", "dog", "owl"]


def decode(sample):
    row = torch.frombuffer(bytearray(sample.content[:8]), dtype=torch.uint8) / 255
    return row, CLASSES.index(sample.path.split("/")[0])


client = fletch.Client("http://127.0.0.1:7380", job="check")
data = EpochDataset(client, "photos", job="check", batch_size=16, transform=decode)
model = torch.nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    for rows, labels in DataLoader(data, num_workers=2):
        loss = torch.nn.functional.cross_entropy(model(rows), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    stats = data.stats()
    assert stats["samples"] == 120, stats
    print("epoch", epoch, "receipt", stats["receipt"])
print("trained: torch", torch.__version__, "loss", round(float(loss), 3))
P
/opt/train/bin/python /tmp/train.py
fletch receipt show check 0
/opt/train/bin/pip uninstall --yes --quiet fletch
nothing_left "the wheel"
