"""The proof of an epoch: its receipt, and what the comparison with the consumed samples says."""

from __future__ import annotations

import json
from typing import Any

from .. import FletchError
from . import receipt_difference
from .ack_tracking import AckTracker


class Proof:
    """The receipt of an epoch, once the server has it.

    Args:
        acks: what the process consumed of the epoch.
        epoch: the epoch's number.
        loader: the id of the process as the rank.
        rank: the only rank; ``None`` if there are several, which `verify` compares together.
    """

    def __init__(self, acks: AckTracker, epoch: int, loader: str, rank: int | None) -> None:
        self._acks, self._epoch, self._loader, self._rank = acks, epoch, loader, rank
        self._receipt: str | None = None
        #: The result of the last comparison of several ranks, and what explains that they do not agree.
        self._agrees: bool | None = None
        self._because: list[str] = []

    @property
    def is_there(self) -> bool:
        """Whether this process has the receipt."""
        return self._receipt is not None

    def fetch(self) -> str:
        """Gets the receipt, and waits for a server that is gone.

        Raises:
            Invalid: the epoch is not finished (``code == "epoch_open"``).
        """
        receipt = str(self._acks.wait_for_server(lambda _: self._acks.job.receipt(self._epoch)))
        self._receipt = receipt
        return receipt

    def ask(self) -> None:
        """Gets the receipt if the epoch is over for all ranks and the server is reachable."""
        try:
            self._receipt = self._acks.job.receipt(self._epoch)
        except FletchError as error:
            # The epoch of a loaded state may not exist on the server yet, or the server may have forgotten
            # it.
            if not error.retryable and error.code not in ("epoch_open", "epoch_closed", "not_found"):
                raise

    def verify(self, total: Any, restored: bool) -> bool:
        """Whether the receipt sum of all ranks is that of the receipt.

        Args:
            total: the sum.
            restored: whether this process loaded a state of the epoch.
        """
        receipt = self._receipt or self.fetch()
        self._agrees = bool(total.agrees(receipt))
        self._because = [] if self._agrees else self._reasons(receipt, total, restored)
        return self._agrees

    def stats(self, total: Any, restored: bool) -> dict[str, Any]:
        """``receipt``, ``differs_because`` and ``certificate`` of `EpochDataset.stats`.

        Args:
            total: the receipt sum of this rank.
            restored: whether this process loaded a state of the epoch.
        """
        agrees, because = self._agrees, self._because
        if self._receipt is not None and self._rank is not None:
            agrees = bool(total.agrees(self._receipt))
            because = [] if agrees else self._reasons(self._receipt, total, restored)
        return {
            "receipt": None if agrees is None else "agrees" if agrees else "differs",
            "differs_because": because,
            "certificate": None if self._receipt is None else json.loads(self._receipt)["certificate"],
        }

    def _reasons(self, receipt: str, total: Any, restored: bool) -> list[str]:
        return receipt_difference.reasons(
            json.loads(receipt),
            loader=self._loader,
            rank=self._rank,
            consumed=total.delivered,
            restored=restored,
        )
