"""Ends a worker whose parent has ended, if torch does not.

A worker of torch remembers its parent's number when it begins. A worker that begins after its parent was
killed takes another process for its parent, and would wait for it for ever.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

#: The seconds after its parent's end in which a worker ends by itself, and removes its files.
_ORPHAN_SECONDS = 15.0

#: The process that the thread of `end_with_parent` watches over, if there is one. A fork copies the number.
_watched = 0


def end_with_parent() -> None:
    """Starts the thread that ends this worker some seconds after its parent has ended. Once for a process."""
    global _watched
    if _watched != os.getpid():
        _watched = os.getpid()
        threading.Thread(target=_end, name="fletch-parent", daemon=True).start()


def _end() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        time.sleep(_ORPHAN_SECONDS)
        os._exit(1)
