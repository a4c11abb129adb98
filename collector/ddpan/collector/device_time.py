"""Times on a device, mapped onto the rank's clock without ever waiting for the device.

An event is recorded on a stream and read later, when the device has passed it. Between two events the device's clock
gives the time; what ties it to the host's clock are two bounds that every event brings for nothing: the device cannot
pass an event before the host recorded it, nor after the host saw it passed. When the device is idle, as while data is
loaded, it passes an event microseconds after it was recorded, so the largest lower bound so far is tight, and it is
what the mapping uses; the distance to the smallest upper bound says how far off it can be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["DeviceEvents", "DeviceTimeline"]


class DeviceEvents(Protocol):
    """What a device offers. None of the methods waits for it."""

    def ready(self) -> bool:
        """Whether events can be recorded and queried now."""

    def record(self) -> Any:
        """Record an event on the current stream and return it."""

    def passed(self, event: Any) -> bool:
        """Whether the device has passed the event."""

    def elapsed_ns(self, first: Any, second: Any) -> int:
        """Nanoseconds on the device from one passed event to another."""

    def release(self, event: Any) -> None:
        """The event is not needed any more."""


@dataclass
class _Pending:
    event: Any
    recorded_ns: int
    write: Callable[[int], None]
    owner: object


class DeviceTimeline:
    """The events of one device, in the order in which they were recorded.

    Device times count from the first event. They are summed up from one event to a near one, because the device tells
    the time between two events as a float of milliseconds, which over hours would be too coarse.

    Args:
        events: the device.
        clock: the host's monotonic clock in nanoseconds.
        most_pending: events kept waiting at the most; beyond it an event is not recorded.
    """

    def __init__(self, events: DeviceEvents, *, clock: Callable[[], int], most_pending: int = 65536) -> None:
        self._events = events
        self._clock = clock
        self._most_pending = most_pending
        self._pending: deque[_Pending] = deque()
        self._base: Any = None
        self._base_device_ns = 0
        self._offset_low_ns: int | None = None
        self._offset_high_ns: int | None = None
        self.left_out = 0

    @property
    def uncertainty_ns(self) -> int | None:
        """How far off the mapping can be, in nanoseconds; None before the first event was read."""
        if self._offset_low_ns is None or self._offset_high_ns is None:
            return None
        return max(0, self._offset_high_ns - self._offset_low_ns)

    def mark(self, write: Callable[[int], None], *, owner: object = None) -> None:
        """Record an event on the current stream; ``write`` gets its time on the host's clock, in a later `poll`.

        ``owner`` is what `waits_for` is asked about.
        """
        if len(self._pending) >= self._most_pending or not self._events.ready():
            self.left_out += 1
            return
        recorded_ns = self._clock()
        self._pending.append(_Pending(self._events.record(), recorded_ns, write, owner))

    def waits_for(self, owner: object) -> bool:
        """Whether a mark of ``owner`` has not been read yet."""
        return any(pending.owner is owner for pending in tuple(self._pending))

    def poll(self) -> None:
        """Hand out the times of the events that the device has passed, the oldest first."""
        while self._pending and self._events.ready() and self._events.passed(self._pending[0].event):
            self._read(self._pending.popleft(), self._clock())

    def _read(self, pending: _Pending, seen_ns: int) -> None:
        if self._base is None:
            self._base = pending.event
            device_ns = 0
        else:
            device_ns = self._base_device_ns + self._events.elapsed_ns(self._base, pending.event)
            self._events.release(self._base)
            self._base, self._base_device_ns = pending.event, device_ns
        pending.write(self._on_host(device_ns, pending.recorded_ns, seen_ns))

    def _on_host(self, device_ns: int, recorded_ns: int, seen_ns: int) -> int:
        low, high = recorded_ns - device_ns, seen_ns - device_ns
        self._offset_low_ns = low if self._offset_low_ns is None else max(self._offset_low_ns, low)
        self._offset_high_ns = high if self._offset_high_ns is None else min(self._offset_high_ns, high)
        if self._offset_low_ns > self._offset_high_ns:
            # The two clocks drifted apart since the older bound: only the newest pair of bounds still holds.
            self._offset_low_ns, self._offset_high_ns = low, high
        return device_ns + self._offset_low_ns
