"""Explains why the samples that a process consumed are not those of the epoch's receipt."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any


#: The most rows that the server lists.
_ROWS_MAX = 256


def reasons(
    receipt: dict[str, Any], *, loader: str, rank: int | None, consumed: int, restored: bool
) -> list[str]:
    """The reasons, as sentences; the surest ones first.

    Args:
        receipt: the server's answer: the receipt, and who acknowledged how much.
        loader: the id of this process.
        rank: the only rank; ``None`` if several ranks were compared together.
        consumed: the number of samples that were compared with the receipt.
        restored: whether this process loaded a state of the epoch.
    """
    rows = receipt.get("acked_by", [])
    delivered = receipt["receipt"]["delivered"]
    found = []
    for row in rows:
        of_rank = [r for r in rows if r["rank"] == row["rank"]]
        is_other = row["rank"] == rank and row.get("loader", {}).get("id") != loader
        if is_other or len(of_rank) > 1:
            found.append(f"{_name(row, loader)} acknowledged {row['entries']} samples of rank {row['rank']}")
    elsewhere = delivered - sum(row["entries"] for row in rows)
    if elsewhere > 0 and len(rows) < _ROWS_MAX:
        found.append(
            f"{elsewhere} samples were acknowledged before the server started or opened the epoch, or are "
            "part of a state that was loaded: the server does not know by which process"
        )
    if restored:
        found.append(
            "this process loaded a state of the epoch: only a state of the same rank, of the same number of "
            "ranks, brings the receipt sum of what was consumed before"
        )
    if consumed != delivered:
        found.append(f"{consumed} samples were compared with a receipt of {delivered}")
    elif not found:
        found.append(
            "the number of samples is right, so some were replaced by others or altered; "
            "`fletch receipt verify` with consumption logs names them"
        )
    return found


def _name(row: dict[str, Any], own: str) -> str:
    loader = row.get("loader")
    if loader is None:
        return "clients that do not name themselves"
    if loader["id"] == own:
        return "this process"
    since = datetime.fromtimestamp(loader["since_ms"] / 1000, timezone.utc)
    return f"process {loader['pid']} on {loader['host']} (since {since:%Y-%m-%dT%H:%M:%SZ})"
