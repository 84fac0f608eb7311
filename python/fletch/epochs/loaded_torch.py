"""PyTorch, if the program itself has imported it.

Must never: import torch. The epochs of this package work without it. Where the program uses torch, they also
seed its generators, and take the ranks of ``torch.distributed``.
"""

from __future__ import annotations

import sys
from typing import Any


def module() -> Any:
    """The module ``torch``, or ``None`` if this process has not imported it."""
    return sys.modules.get("torch")


def default_collate() -> Any:
    """Torch's function that makes a batch of items, or ``None`` if this process has not imported it."""
    data = sys.modules.get("torch.utils.data")
    return None if data is None else data.default_collate


def distributed() -> Any:
    """The module ``torch.distributed`` if its processes are joined, else ``None``."""
    processes: Any = sys.modules.get("torch.distributed")
    if processes is None or not processes.is_available() or not processes.is_initialized():
        return None
    return processes
