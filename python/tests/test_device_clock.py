"""The device's time of a step, by events that keep the rules of CUDA's. No test needs a device."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable

import pytest

from conftest import Server
from fletch.torch import DataLoader
from fletch.epochs.ack_tracking import AckTracker
from fletch.epochs.device_clock import DeviceClock, cuda_event
from fletch.epochs.lease_stream import Batch
from test_epochs import epochs, make_tree
from test_gone import _DELIVERY, _ROOT


class Device:
    """A device with a queue of work, by a clock in milliseconds. It begins when there is work."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.now_ms = 0.0
        self.clock = clock or (lambda: self.now_ms)
        #: When it has done all work.
        self.free_at_ms = 0.0
        self.made = 0

    def launch(self, milliseconds: float) -> None:
        """Gives it work, and does not wait."""
        self.free_at_ms = max(self.clock(), self.free_at_ms) + milliseconds

    def event(self) -> FakeEvent:
        self.made += 1
        return FakeEvent(self)


class FakeEvent:
    """As `torch.cuda.Event(enable_timing=True)`: the device notes when it comes to the event.

    A second `record` takes the place of the first. A time exists only after the device has passed the event.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.at_ms = math.inf

    def record(self) -> None:
        self.at_ms = max(self.device.clock(), self.device.free_at_ms)

    def query(self) -> bool:
        return self.device.clock() >= self.at_ms

    def elapsed_time(self, end_event: FakeEvent) -> float:
        if not (self.query() and end_event.query()):
            raise RuntimeError("the event is not complete")
        return end_event.at_ms - self.at_ms


class Acks:
    """A job that keeps what is acknowledged."""

    def __init__(self) -> None:
        self.times: list[tuple[int, int, int, int | None, int | None]] = []
        self.in_loop: list[bool] = []

    def hold(self, token: Any, grant: bytes = b"") -> bool:
        return True

    def drop_lease(self, token: Any) -> None: ...

    def settle(self, within: float) -> bool:
        return True

    def ack(self, token: Any, times: Any, report: Any, within: Any = None, in_loop: bool = False) -> Any:
        self.times.append(times)
        self.in_loop.append(in_loop)
        return {}


def step(acks: AckTracker, lease: int, work: Callable[[], Any]) -> None:
    acks.hand_out(Batch((0, 0, lease, 1, 60_000), deliveries=_DELIVERY), 0)
    work()
    acks.mark_consumed()
    acks.flush_acks(more=True)


def test_a_time_is_reported_when_the_device_is_there_and_nobody_waits() -> None:
    device, job = Device(), Acks()
    acks = AckTracker(job, "job", 0, _ROOT, DeviceClock(device.event))  # type: ignore[arg-type]
    for lease in range(1, 6):
        # The loop asks for the next batch while the device computes.
        step(acks, lease, lambda lease=lease: device.launch(lease))
        device.now_ms += lease
    assert [times[3] for times in job.times] == [None, 1_000_000, 2_000_000, 3_000_000, 4_000_000]
    # The loop waits for its device in each step.
    device, job = Device(), Acks()
    acks = AckTracker(job, "job", 0, _ROOT, DeviceClock(device.event))  # type: ignore[arg-type]

    def synchronous() -> None:
        device.launch(2.5)
        device.now_ms += 2.5

    for lease in range(1, 100):
        step(acks, lease, synchronous)
    assert {times[3] for times in job.times} == {2_500_000}
    assert device.made == 2, "events are recorded again"


def test_a_device_that_is_far_behind_or_fails_costs_no_memory_and_no_step() -> None:
    device, job = Device(), Acks()
    clock = DeviceClock(device.event)
    clock.end()
    acks = AckTracker(job, "job", 0, _ROOT, clock)  # type: ignore[arg-type]
    for lease in range(1, 200):
        step(acks, lease, lambda: device.launch(10))
    assert clock.steps == 64 and len(job.times) == 199 and {times[3] for times in job.times} == {None}
    assert device.made <= 2 * 65
    for broken in ("record", "query", "elapsed_time"):

        def fails(*_: Any) -> Any:
            raise RuntimeError("CUDA error: device-side assert triggered")

        device, job = Device(), Acks()

        def event(device: Device = device, broken: str = broken) -> FakeEvent:
            made = device.event()
            setattr(made, broken, fails)
            return made

        clock = DeviceClock(event)
        acks = AckTracker(job, "job", 0, _ROOT, clock)  # type: ignore[arg-type]
        for lease in range(1, 9):
            step(acks, lease, lambda: None)
        assert [times[3] for times in job.times] == [None] * 8 and clock.steps == 0, broken
        assert device.made <= 2, "it is not tried again"


def test_a_loop_that_prepares_its_batch_says_when_it_steps() -> None:
    device, job = Device(), Acks()
    acks = AckTracker(job, "job", 0, _ROOT, DeviceClock(device.event))  # type: ignore[arg-type]
    acks.begin_step()
    acks.hand_out(Batch((0, 0, 1, 1, 60_000), deliveries=_DELIVERY, received_ns=5), 7)
    time.sleep(0.05)
    device.now_ms += 50
    acks.begin_step()
    device.launch(3)
    device.now_ms += 3
    acks.mark_consumed()
    acks.flush_acks()
    (waited, prepared, stepped, on_device, received), in_loop = job.times[0], job.in_loop[0]
    assert in_loop and prepared >= 50_000_000 and waited == 7 + prepared and stepped < prepared
    assert on_device == 3_000_000, "without the time in which the loop decoded"
    step(acks, 2, lambda: None)
    assert job.times[1][1] == 0 and not job.in_loop[1], "the workers prepared this one"
    assert (received, job.times[1][4]) == (5, None), "as the process says that received the batch"
    assert acks.counts["stepped_ns"] >= prepared, "what the loop did with its batches"


def test_a_script_without_a_device_has_no_events(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    assert cuda_event() is None and not torch.cuda.is_initialized()
    # The clock itself imports nothing of torch.
    alone = tmp_path / "alone.py"
    alone.write_text(
        "import sys\n"
        "import fletch.epochs.device_clock as clock\n"
        "assert clock.cuda_event() is None and 'torch' not in sys.modules\n"
        "print('no torch')\n"
    )
    said = subprocess.run([sys.executable, alone], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout == "no torch\n"


class FakeCuda:
    """As `torch.cuda` of a script that holds memory of device 1 only."""

    def __init__(self) -> None:
        self.device, self.looked = 0, 0

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return self.device

    def memory_reserved(self, device: int) -> int:
        self.looked += 1
        return 4096 * device

    def Event(self, enable_timing: bool) -> str:
        assert enable_timing
        return f"event of {self.device}"


def test_no_event_takes_memory_of_a_device_that_the_script_does_not_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda()
    monkeypatch.setattr("fletch.epochs.device_clock._used", set())
    monkeypatch.setitem(sys.modules, "torch", type("torch", (), {"cuda": cuda}))
    assert cuda_event() is None
    cuda.device = 1
    assert [cuda_event() for _ in range(3)] == ["event of 1"] * 3 and cuda.looked == 2


def test_a_server_takes_device_times_and_shows_preparation(own_server: Server) -> None:
    """The same loop, which decodes in its steps, with and without a word about it.

    The device's marks stand around the whole step, so they alone do not show that it is idle at first.
    """
    make_tree(own_server)
    verdicts = {}
    for job in ("silent", "says"):
        dataset = epochs(own_server, job, batch_size=4)
        device = Device(lambda: time.monotonic() * 1000)
        dataset._acks._device = DeviceClock(device.event)
        for _ in DataLoader(dataset, num_workers=1):
            time.sleep(0.02)
            if job == "says":
                dataset.begin_step()
            device.launch(2)
            time.sleep(0.003)
        shown = dataset._job.info()["benefit"]
        assert shown.get("not_measured") is None, shown
        verdicts[job] = shown["estimate"]["verdict"], shown["estimate"]["preparation"] > 0.5
    # What a silent loop waits for besides depends on the machine.
    assert verdicts["says"] == ("preparation", True) and not verdicts["silent"][1], verdicts
