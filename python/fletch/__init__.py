"""Fletch: reads datasets from a Fletch server, and checks every byte by its hash.

>>> client = fletch.Client("unix:/run/fletch/server.sock", job="resnet")
>>> version = client.resolve("photos@v3")
>>> len(version), version.nbytes
>>> view = version.read("train/cat/1.jpg")          # a read-only memoryview

Calls release the GIL, end within the client's timeout, and can be interrupted by Ctrl-C. Clients and versions
can be used in forked processes and pickled to others: each process makes its own connections.

:class:`Epochs` gives a training loop each sample exactly once, in an order that the server chooses. It needs
no framework. Loaders for PyTorch are in :mod:`fletch.torch`.
"""

import os as _os

from . import _native
from ._native import Client, Entry, PendingRead, Sample, Version, __version__
from .errors import Corrupt, FletchError, Internal, Invalid, NotFound, Overloaded, Unavailable

# Its modules import the names above from here.
from .epochs import Epochs, EpochSample, Selection

_os.register_at_fork(
    before=_native._before_fork,
    after_in_child=_native._after_fork_in_child,
    after_in_parent=_native._after_fork_in_parent,
)

__all__ = [
    "Client",
    "Corrupt",
    "Entry",
    "EpochSample",
    "Epochs",
    "FletchError",
    "Internal",
    "Invalid",
    "NotFound",
    "Overloaded",
    "PendingRead",
    "Sample",
    "Selection",
    "Unavailable",
    "Version",
    "__version__",
]
