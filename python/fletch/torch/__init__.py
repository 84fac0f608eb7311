"""PyTorch datasets and a loader over Fletch. Needs torch 1.13 or later; images need Pillow.

- :class:`EpochDataset`: epochs in which the server chooses the order. Each sample is delivered exactly once,
  and a receipt proves it.
- :class:`EvalDataset`: whole passes in order, for validation, test and inference.
- :class:`MapDataset`: the samples of a version by index.
- :class:`ImageFolder`: the same interface as ``torchvision.datasets.ImageFolder``.
- :class:`DataLoader`: torch's loader, which reads a whole batch in one request.

All of them work with any number of workers, started by fork, spawn or forkserver, also after the dataset was
used in the parent: each process makes its own connections.
"""

from ..epochs.lease_stream import EpochSample
from ..epochs.sample_errors import SKIP
from ..epochs.selection import Selection
from . import views as _views
from .epochs import EpochDataset
from .evaluation import EvalDataset, EvalSample
from .images import IMAGE_EXTENSIONS, ImageFolder
from .loader import DataLoader
from .map import MapDataset

__all__ = [
    "IMAGE_EXTENSIONS",
    "SKIP",
    "DataLoader",
    "EpochDataset",
    "EpochSample",
    "EvalDataset",
    "EvalSample",
    "ImageFolder",
    "MapDataset",
    "Selection",
]
