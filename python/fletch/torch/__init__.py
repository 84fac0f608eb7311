"""PyTorch datasets and a loader over Fletch. Needs torch 1.13 or later; images need Pillow.

- :class:`EpochDataset`: epochs in which the server chooses the sample, each exactly once, with a receipt.
- :class:`MapDataset`: the samples of a version by index.
- :class:`ImageFolder`: the same surface as torchvision's dataset of that name.
- :class:`DataLoader`: torch's loader, which reads a whole batch in one go.

All of them work with any number of workers, started by fork, spawn or forkserver, whether or not
they were used before: each process makes connections of its own.
"""

from . import views as _views
from .epochs import EpochDataset
from .images import IMAGE_EXTENSIONS, ImageFolder
from .loader import DataLoader
from .map import MapDataset
from .receive import EpochSample
from .select import Selection

__all__ = [
    "IMAGE_EXTENSIONS",
    "DataLoader",
    "EpochDataset",
    "EpochSample",
    "ImageFolder",
    "MapDataset",
    "Selection",
]
