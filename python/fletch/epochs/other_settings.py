"""Hints for a job that was declared with other settings: the argument or the call that is missing."""

from __future__ import annotations

import re

from .. import Invalid

#: For each setting of a job: what to write if the server's job has another one.
_OTHER_SETTINGS = {
    "seed": "give seed= as before (without it, the seed is the hash of the job's name)",
    "world": "give the earlier batch_size=, ranks= and tail=; to continue with another number of ranks, call "
    "load_state_dict() with a state of the job before the loop",
    "version": "the dataset's tag has moved, or was given in another form; name the job's version as "
    "NAME@TAG or NAME@ROOT",
    "dataset": "give the earlier dataset",
    "plan": "give plan= and select= as before, or the file of select= has changed",
    "ledger to replay": "give the earlier ledger as replay=",
    "layout": "the dataset was packed again; continue with load_state_dict() under another job name",
}


def hint_of_other_settings(error: Invalid, job: str) -> str:
    """What to write in Python if the server's job has another setting than the declaration.

    Args:
        error: the server's error, whose code is ``job_differs``.
        job: the job's name.
    """
    named = re.search(r"declared with another ([a-z ]+)", str(error))
    setting = "" if named is None else named[1].strip()
    same = _OTHER_SETTINGS.get(setting, f"give {setting or 'settings'}= as before")
    return f"{same}; for a new run give another job=, or delete the job (`fletch jobs delete {job}`)"
