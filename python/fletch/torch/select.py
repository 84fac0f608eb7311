"""Selections: which samples an epoch delivers, from a table that somebody made."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from .. import Invalid, _native


@dataclass(frozen=True)
class Selection:
    """A Parquet or CSV file of which each row names a sample of the version.

    Attributes:
        path: the file. CSV has a line of names.
        keys: the column of keys (the path of a sample that is one file). Without this and ``numbers``: the column ``key``
            if there is one, or else ``number``.
        numbers: the column of sample numbers, from 0, in place of keys.
        weights: a column of weights, each finite and at least 0: then an epoch is ``draws`` samples in proportion to
            them, an exact multiset that the seed fixes.
        draws: samples of an epoch, with weights; as many as the file has rows when absent.
    """

    path: str | os.PathLike[str]
    keys: str | None = None
    numbers: str | None = None
    weights: str | None = None
    draws: int | None = None

    def base(self) -> Any:
        """The ``base`` of a plan. The file is read.

        Raises:
            NotFound: there is no such file.
            Invalid: it cannot be read, has no such column (the message lists those it has), names a sample twice, or
                has a value that is none.
        """
        if self.draws is not None and self.weights is None:
            raise Invalid("draws are of weights: name the column that has them")
        columns = (self.keys, self.numbers, self.weights)
        return json.loads(_native._select(os.fspath(self.path), *columns, self.draws))


def planned(
    plan: dict[str, Any] | None, select: Selection | str | os.PathLike[str] | None
) -> dict[str, Any] | None:
    """A plan with what was selected as its base."""
    if select is None:
        return plan
    if plan is not None and "base" in plan:
        raise Invalid("give select, or a plan with a base, and not both")
    chosen = select if isinstance(select, Selection) else Selection(select)
    return {**(plan or {}), "base": chosen.base()}
