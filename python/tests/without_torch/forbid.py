"""Makes frameworks unimportable in this process, whatever is installed. Import it first."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any

FORBIDDEN = ("torch", "torchvision", "tensorflow", "jax", "PIL")


class _Forbidden(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in FORBIDDEN:
            raise ImportError(f"{name} is forbidden in this process")


sys.meta_path.insert(0, _Forbidden())
