"""The declaration of a job: the settings that the server gets, and the length of an epoch of a rank.

Invariant: a job of another number of ranks keeps the server's world until `Declaration.declare_world`.
"""

from __future__ import annotations

import base64
import json
import logging
import time
from typing import Any, Callable, NamedTuple

from .. import Client, Invalid, Unavailable, _native
from .drafts import is_draft_error, seal
from .other_settings import hint_of_other_settings
from .rank_loader import RankLoader
from .server_wait import ServerWait, Stalls

_log = logging.getLogger("fletch")

#: A sweep with room for fewer units shares almost nothing, as `SWEEP_UNITS_MIN` of the server says.
_SWEEP_UNITS_MIN = 5


class EpochLength(NamedTuple):
    """The length of an epoch of one rank. ``samples`` includes those that pad a last step."""

    steps: int
    samples: int


def spec_of(
    job: str, dataset: str, world: dict[str, Any], replay: bytes | None, **settings: Any
) -> dict[str, Any]:
    """The settings of a job, as ``POST /v1/jobs`` takes them. Settings that are ``None`` are left out.

    Args:
        job: the job's name.
        dataset: ``NAME[@TAG or ROOT]``.
        world: the ranks, the samples of a step of all ranks, and the tail.
        replay: the ledger to repeat.
        settings: the other ones, by their names on the wire.
    """
    name, tag = split_tag(dataset)
    ledger = None if replay is None else {"ledger": base64.b64encode(replay).decode()}
    optional = {"version": tag, "replay": ledger, **settings}
    spec = {"name": job, "dataset": name, "world": world}
    return {**spec, **{key: value for key, value in optional.items() if value is not None}}


def split_tag(dataset: str) -> tuple[str, str | None]:
    """The name of ``NAME[@TAG or ROOT]``, and the tag or root if there is one."""
    head, slash, last = dataset.rpartition("/")
    name, at, tag = last.partition("@")
    return head + slash + name, tag if at else None


class Declaration:
    """A job that this process declared. A worker's copy has the job alone.

    Args:
        client: the client.
        spec: the job's settings, as `spec_of` makes them.
        loader: the name of this process as the rank.
        server_wait: for how many seconds a declaration waits while the job's server is gone; ``None``: for
            ever.
        move: moves the job to another server if its server is gone. Returns whether it did.
        describes: whether a job whose server is away need not be waited for: what its declaration says is
            enough.

    Attributes:
        job: the job, whose requests name the loader.
        described: the description of a job whose server is away, without epochs.
        stalls: the time for which the declaration waited for a server.
        client: the client.
        loader: the name of this process as the rank. Its workers inherit it.
        world_differs: whether the server's job has another number of ranks, which `declare_world` changes.

    Raises:
        Invalid: the server's job has other settings (``code == "job_differs"``).
        Unavailable: no server answered, or the job's server was gone for ``server_wait``.
    """

    def __init__(
        self,
        client: Client,
        spec: dict[str, Any],
        loader: RankLoader,
        server_wait: float | None,
        move: Callable[[], bool] | None = None,
        describes: bool = False,
    ) -> None:
        self.client: Any = client
        self._spec: Any = spec
        self.loader = loader
        self.world_differs = False
        self.described: dict[str, Any] | None = None
        self.stalls: Stalls = []
        wait = ServerWait(f"job {spec['name']}", server_wait)
        while True:
            began = time.monotonic()
            try:
                self._declare_sealed()
                self.stalls = wait.end()
                return
            except Unavailable as error:
                # Another error says that no server answers at all. The client has tried long enough.
                if error.code != "job_waits":
                    raise
                if describes and self._describe():
                    _log.warning("job %s: %s", spec["name"], error)
                    self.stalls = [(wait.begun, time.monotonic_ns())]
                    return
                if move is None or not move():
                    wait.report(time.monotonic() - began, str(error))

    def _describe(self) -> bool:
        """Takes the description of a job whose server is away. Returns whether there is one."""
        try:
            found = self.loader.describe(self.client, self._spec)
        except Unavailable as error:
            # A server of an earlier release describes no job.
            if error.code != "job_waits":
                raise
            return False
        if found is None:
            return False
        self.job, self.described = found
        self.world_differs = self.described["world"]["ranks"] != self.world["ranks"]
        return True

    def _declare_sealed(self) -> None:
        """Declares the job. A draft is sealed first."""
        try:
            self._declare()
        except Invalid as error:
            if not is_draft_error(error):
                raise
            seal(self.client, self._spec["dataset"])
            self._declare()

    def _declare(self) -> None:
        """Declares the job. One with another number of ranks keeps its world."""
        try:
            self.job = self.loader.declare(self.client, self._spec)
        except Invalid as error:
            self._take_other_world(error)

    def _take_other_world(self, error: Invalid) -> None:
        if error.code != "job_differs":
            raise error
        self.world_differs = True
        self.job = self._declared(self._spec_with_servers_world())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "client": None, "_spec": None}

    @property
    def world(self) -> dict[str, Any]:
        """The ranks, the samples of a step of all ranks, and the tail of this process's declaration."""
        world: dict[str, Any] = self._spec["world"]
        return world

    def declare_world(self) -> None:
        """Declares the job with this process's world.

        Raises:
            Invalid: the server's world still differs.
        """
        self.job = self._declared(self._spec)
        self.world_differs = False

    def length(self, info: dict[str, Any], batch_size: int) -> EpochLength:
        """The length of an epoch of one rank, by the server's description of the job."""
        tail, entries, step = self.world["tail"], info["entries"], batch_size * self.world["ranks"]
        steps: int = info["steps"]
        if self.world_differs:
            # The server still counts with another number of ranks.
            steps = entries // step if tail == "drop" else -(-entries // step)
        whole = steps * batch_size
        return EpochLength(steps, min(whole, entries) if tail == "keep" else whole)

    def _spec_with_servers_world(self) -> dict[str, Any]:
        text = _native._world(self.client, self._spec["name"])
        world = self.world if text is None else json.loads(text)
        # Only a job with another number of ranks may get a new world.
        return self._spec if world["ranks"] == self.world["ranks"] else {**self._spec, "world": world}

    def _declared(self, spec: dict[str, Any]) -> _native.Job:
        """Declares the job. An error of other settings names the argument that would make them the same."""
        try:
            return self.loader.declare(self.client, spec)
        except Invalid as error:
            if error.code != "job_differs":
                raise
            hint = hint_of_other_settings(error, self._spec["name"])
            raise Invalid(f"{error}: {hint}", error.code, hint) from None


def warns_of_small_sweep(job: str, info: dict[str, Any]) -> bool:
    """Logs a warning if the cache holds so few chunks that jobs share almost nothing. Returns whether."""
    sweep = info.get("sweep") or {}
    capacity, total, unit = (sweep.get(f"{key}_bytes", 0) for key in ("capacity", "total", "unit"))
    if not (unit and capacity < total and capacity // unit < _SWEEP_UNITS_MIN <= total // unit):
        return False
    _log.warning(
        "job %s: the server's sweep holds %d chunks of %d bytes, and below %d it shares almost nothing; give "
        "its cache more space, or pack the dataset with smaller chunks",
        job, capacity // unit, unit, _SWEEP_UNITS_MIN,
    )
    return True
