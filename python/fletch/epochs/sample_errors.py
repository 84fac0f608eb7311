"""Errors of samples: the name of the sample as a note of the error, and the choice to go on without it.

Invariants:
    1. An error keeps its type. The note only adds to it.
    2. A retryable error of Fletch is never skipped: it says that a server is away, and nothing of the sample.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from typing import Any, Callable, Literal, Sequence, Union

from .. import FletchError, Invalid

_log = logging.getLogger("fletch")

#: The skips that a process logs one by one. After them it logs one of `_SKIPS_PER_WARNING`.
_SKIPS_LOGGED = 10
_SKIPS_PER_WARNING = 1000

#: The most samples that the note of an error of a whole batch names.
_NAMED_MAX = 16


class _Skip:
    """The type of `SKIP`."""

    def __repr__(self) -> str:
        return "fletch.torch.SKIP"

    def __reduce__(self) -> str:
        return "SKIP"


#: What a callable ``on_error`` returns to leave the sample out.
SKIP = _Skip()

#: What happens at an error of ``transform``: see `EpochDataset`.
OnError = Union[Literal["raise", "skip"], Callable[[Exception, Any], Any]]


def named(path: str, key: str, number: int | None, ordinal: int) -> str:
    """The text that identifies a sample in an error."""
    of_key = "" if key == path else f"key {key}, "
    of_number = "" if number is None else f"number {number}, "
    return f"{path} ({of_key}{of_number}ordinal {ordinal})"


def name_of(sample: Any) -> str:
    """The text that identifies an `EpochSample` or an `EvalSample` in an error."""
    return named(sample.path, sample.key or sample.path, sample.number, sample.ordinal)


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to an error.

    Tracebacks, also those that torch sends from its workers, show notes since Python 3.11. Before that the
    note becomes a part of the error's message.
    """
    if isinstance(error, FletchError) or sys.version_info >= (3, 11):
        add: Callable[[str], None] = error.add_note  # type: ignore[attr-defined]
        add(note)
        return
    # The messages of these two are attributes, beside `args`.
    for kind, attribute in ((OSError, "strerror"), (UnicodeError, "reason")):
        if isinstance(error, kind) and isinstance(said := getattr(error, attribute, None), str):
            setattr(error, attribute, f"{said}\n{note}")
            return
    first, *more = error.args or ("",)
    if isinstance(first, str) and not isinstance(error, KeyError):
        error.args = (f"{first}\n{note}" if first else note, *more)
    else:
        error.args = (*error.args, note)


def add_batch_note(error: BaseException, names: Sequence[str]) -> None:
    """Notes the samples of the batch that ``collate_fn`` could not make, by their names."""
    more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    listed = ", ".join(names[:_NAMED_MAX])
    add_note(error, f"fletch: collate_fn failed for a batch of {len(names)} samples: {listed}{more}")


@dataclass
class ItemMaker:
    """Makes the items of samples, and treats the errors of ``transform`` as ``on_error`` says.

    Attributes:
        transform: makes an item of a sample; ``None``: the item is the sample's content.
        on_error: ``"raise"``, ``"skip"``, or a callable that returns an item in place of the failed one.
        skipped: the samples that were left out.
    """

    transform: Callable[[Any], Any] | None
    on_error: OnError
    skipped: int = field(default=0)

    def item(self, sample: Any) -> Any:
        """The item of a sample, or `SKIP`.

        Raises:
            Exception: that of ``transform`` or of ``on_error``, with a note that names the sample.
        """
        if self.transform is None:
            return sample.content
        try:
            return self.transform(sample)
        except Exception as error:
            add_note(error, f"fletch: transform failed for the sample {name_of(sample)}")
            if self.on_error == "raise" or (isinstance(error, FletchError) and error.retryable):
                raise
            item = self._replacement(error, sample)
        if item is SKIP:
            self.skipped += 1
        return item

    def _replacement(self, error: Exception, sample: Any) -> Any:
        if callable(self.on_error):
            return self.on_error(error, sample)
        count = self.skipped + 1
        if count <= _SKIPS_LOGGED or count % _SKIPS_PER_WARNING == 0:
            _log.warning(
                "sample %s is skipped, the %d. of this process: %s: %s",
                name_of(sample), count, type(error).__name__, error,
            )
        return SKIP


def checked_on_error(on_error: Any) -> OnError:
    """Returns ``on_error`` if it is valid.

    Raises:
        Invalid: it is not.
    """
    if on_error in ("raise", "skip") or callable(on_error):
        return on_error  # type: ignore[no-any-return]
    raise Invalid(
        f'on_error is {on_error!r}; give "raise", "skip", or a callable of the error and the sample'
    )
