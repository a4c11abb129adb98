"""The mapping of device times, against a device that is simulated: no CUDA here, and none is claimed."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from ddpan.collector.device_time import DeviceTimeline


@dataclass
class FakeDevice:
    """A device that passes events in order, each when its work is done; its clock can drift. Waiting is counted."""

    host_ns: int = 10**12
    drift: float = 0.0
    busy_until_ns: int = 0
    events: list[int] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    waits: int = 0

    def now(self) -> int:
        return self.host_ns

    def launch(self, work_ns: int) -> None:
        """Queue work on the device, as a kernel does."""
        self.busy_until_ns = max(self.busy_until_ns, self.host_ns) + work_ns

    def ready(self) -> bool:
        return True

    def record(self) -> int:
        self.events.append(max(self.busy_until_ns, self.host_ns))
        return len(self.events) - 1

    def passed(self, event: int) -> bool:
        return self.events[event] <= self.host_ns

    def elapsed_ns(self, first: int, second: int) -> int:
        if not (self.passed(first) and self.passed(second)):
            self.waits += 1
        return round((self.events[second] - self.events[first]) * (1 + self.drift))

    def release(self, event: int) -> None:
        self.released.append(event)


def timeline(device: FakeDevice, **options: int) -> tuple[DeviceTimeline, list[int]]:
    return DeviceTimeline(device, clock=device.now, **options), []


def test_an_idle_device_is_mapped_exactly() -> None:
    device = FakeDevice()
    line, seen = timeline(device)
    for _ in range(5):
        device.host_ns += 1_000_000
        line.mark(seen.append)
        line.poll()
    assert seen == device.events
    assert line.uncertainty_ns == 0


def test_a_busy_device_is_mapped_exactly_once_it_was_idle() -> None:
    device = FakeDevice()
    line, seen = timeline(device)
    line.mark(seen.append)
    for _ in range(20):
        device.launch(3_000_000)
        line.mark(seen.append)
        device.host_ns += 1_000_000
        line.poll()
    device.host_ns += 10**9
    line.poll()
    assert seen == device.events
    assert device.events[-1] == 10**12 + 20 * 3_000_000


def test_what_is_not_passed_yet_is_not_touched() -> None:
    device = FakeDevice()
    line, seen = timeline(device)
    device.launch(5_000_000)
    line.mark(seen.append)
    line.poll()
    assert seen == []
    assert device.waits == 0
    device.host_ns += 5_000_000
    line.poll()
    assert len(seen) == 1


def test_never_idle_means_an_uncertainty_that_holds() -> None:
    device = FakeDevice()
    device.launch(50_000_000)
    line, seen = timeline(device)
    for _ in range(50):
        device.launch(2_000_000)
        line.mark(seen.append)
        device.host_ns += 2_000_000
        line.poll()
    device.host_ns += 10**9
    line.poll()
    assert line.uncertainty_ns is not None
    for told, true in zip(seen, device.events, strict=True):
        assert true - 52_000_000 <= told <= true


@given(
    work=st.lists(st.integers(0, 3_000_000), min_size=30, max_size=120),
    drift=st.floats(-1e-4, 1e-4),
)
def test_a_drifting_device_is_followed(work: list[int], drift: float) -> None:
    device = FakeDevice(drift=drift)
    line, seen = timeline(device)
    for work_ns in work:
        device.launch(work_ns)
        line.mark(seen.append)
        device.host_ns += 4_000_000
        line.poll()
    assert len(seen) == len(work)
    assert device.waits == 0
    elapsed = device.events[-1] - device.events[0]
    for told, true in zip(seen, device.events, strict=True):
        assert abs(told - true) <= 3_000_000 + elapsed * abs(drift) + 1


def test_events_are_given_back_and_the_queue_is_bounded() -> None:
    device = FakeDevice()
    line, seen = timeline(device, most_pending=4)
    device.launch(10**9)
    for _ in range(6):
        line.mark(seen.append)
    assert line.left_out == 2
    device.host_ns += 2 * 10**9
    line.poll()
    assert len(seen) == 4
    assert device.released == [0, 1, 2]


def test_no_answer_before_the_first_event() -> None:
    line, _ = timeline(FakeDevice())
    assert line.uncertainty_ns is None
