"""Selections: the samples of an epoch, from a table that the user made."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from .. import Invalid, _native


@dataclass(frozen=True)
class Selection:
    """A Parquet or CSV file in which each row names a sample of the version.

    Attributes:
        path: the file. A CSV file has a line of column names.
        keys: the column of keys. The key of a sample that is one file is the file's path. If neither this nor
            ``numbers`` is given, the column ``key`` is used if there is one, else the column ``number``.
        numbers: the column of sample numbers, from 0, in place of keys.
        weights: a column of weights, each finite and at least 0. An epoch is then ``draws`` samples in
            proportion to them, an exact multiset that the seed fixes.
        draws: the samples of an epoch with weights; by default the number of rows of the file.
    """

    path: str | os.PathLike[str]
    keys: str | None = None
    numbers: str | None = None
    weights: str | None = None
    draws: int | None = None

    def base(self) -> Any:
        """Reads the file and returns the ``base`` of a plan.

        Raises:
            NotFound: the file does not exist.
            Invalid: the file cannot be read, lacks the column (the message lists its columns), names a sample
                twice, or has a value that is not valid.
        """
        if self.draws is not None and self.weights is None:
            raise Invalid(f"draws is {self.draws}, and weights is not given: name the column of weights")
        columns = (self.keys, self.numbers, self.weights)
        return json.loads(_native._select(os.fspath(self.path), *columns, self.draws))


def plan_with_selection(
    plan: dict[str, Any] | None, select: Selection | str | os.PathLike[str] | None
) -> dict[str, Any] | None:
    """The plan, with the selection as its base.

    Raises:
        Invalid: the plan has a base already.
    """
    if select is None:
        return plan
    if plan is not None and "base" in plan:
        raise Invalid("both select and a plan with a base are given; give one of them")
    chosen = select if isinstance(select, Selection) else Selection(select)
    return {**(plan or {}), "base": chosen.base()}
