"""Drafts: versions that were only listed. Samples need the hashes of their files, so a draft is sealed first.

The server seals: it reads what nobody has read of the draft, and makes the version. That goes on without this
process.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from .. import Client, Corrupt, NotFound, Unavailable, Version, _native

_log = logging.getLogger("fletch")

#: The seconds between two looks at a sealing, and between two lines of its progress.
_LOOK_EVERY, _SAY_EVERY = 0.5, 30.0


def is_draft_error(error: Exception) -> bool:
    """Whether a call failed because the version is a draft."""
    return getattr(error, "code", "") == "not_sealed"


def resolve_sealed(client: Client, dataset: str) -> Version:
    """The version that ``NAME[@TAG or ROOT]`` names. A draft is sealed first."""
    version = client.resolve(dataset)
    if not version.draft:
        return version
    seal(client, version.dataset)
    return client.resolve(dataset)


def seal(client: Client, dataset: str) -> None:
    """Has the server seal the draft that ``latest`` of a dataset names, and waits for it.

    Args:
        client: the client of the server.
        dataset: the name of the dataset, without a tag.

    Raises:
        Corrupt: objects changed since they were listed (``code == "origin_changed"``).
        Unavailable: the sealing failed. What was read is not read again.
    """
    sealing = json.loads(_native._seal(client, dataset))
    said = time.monotonic()
    if sealing["state"] == "running":
        _log.warning(
            "dataset %s is a draft, whose samples are not known: the server reads it first (%s); "
            "`fletch seal %s` shows how far it is",
            dataset, _progress(sealing), dataset,
        )
    while sealing["state"] == "running":
        time.sleep(_LOOK_EVERY)
        try:
            sealing = json.loads(_native._sealing(client, dataset))
        except NotFound:
            # Another server of the cluster answers, or the server was started again.
            sealing = json.loads(_native._seal(client, dataset))
        if time.monotonic() - said >= _SAY_EVERY:
            said = time.monotonic()
            _log.warning("dataset %s: the server reads its draft (%s)", dataset, _progress(sealing))
    if sealing["state"] != "done":
        problem = sealing.get("error") or {
            "detail": f"it ended as {sealing['state']!r}, which this version does not know",
            "code": "unknown",
            "hint": "use the package of the server's release",
        }
        kind = Corrupt if sealing["state"] == "blocked" else Unavailable
        text = f"dataset {dataset} cannot be sealed: {problem['detail']}; {problem['hint']}"
        raise kind(text, problem["code"], problem["hint"], problem.get("retryable", False))


def _progress(sealing: dict[str, Any]) -> str:
    done = sealing["bytes_known"] + sealing["bytes_read"]
    return f"{100 * done // max(1, sealing['bytes'])} % of {sealing['bytes'] / 1e9:.2f} GB"
