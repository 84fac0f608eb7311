"""The epochs of a job: leases as batches, their acks, states and receipts. Nothing here imports torch.

- `Epochs`, as :class:`fletch.Epochs`: epochs as lists of samples, for every loop without PyTorch.
- :mod:`fletch.torch` builds its `EpochDataset` on the same parts.
"""

from .epochs import Epochs
from .lease_stream import EpochSample
from .selection import Selection

__all__ = ["EpochSample", "Epochs", "Selection"]
