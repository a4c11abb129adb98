"""Records whose times are a device's: they are filled in when the device has got there, in a later step.

On a device a launch is the moment at which its stream reaches the collective, which is also when the bucket's last
gradient is ready there; and a collective starts when it is launched and the one before it on its group is over, because
a group's collectives share a stream.
"""

from __future__ import annotations

from typing import Final

from .device_time import DeviceTimeline
from .schema import COLLECTIVE_RECORD
from .segments import COLLECTIVE_END, COLLECTIVE_READY, INT64, Segment, Slot, Spool

__all__ = ["DeviceRecords"]

_LAUNCH: Final[int] = COLLECTIVE_RECORD.fields["launch_ns"][1]  # type: ignore[index]
_START: Final[int] = COLLECTIVE_RECORD.fields["start_ns"][1]  # type: ignore[index]


class DeviceRecords:
    """Marks places in the work of a device and writes their times into records.

    Args:
        timeline: the device's events.
        spool: counts what came too late.
    """

    def __init__(self, timeline: DeviceTimeline, spool: Spool) -> None:
        self._timeline = timeline
        self._spool = spool
        self._last_end_ns: dict[int, int] = {}

    def poll(self) -> None:
        """Write the times that have become known."""
        self._timeline.poll()

    def owes(self, segment: Segment) -> bool:
        """Whether a record in ``segment`` still waits for a time."""
        return self._timeline.waits_for(segment)

    def step(self, slot: Slot, place: int) -> None:
        """The time at which the current stream gets here goes to ``place`` in a step record."""
        self._timeline.mark(lambda time_ns: self._set(slot, place, time_ns), owner=slot[0])

    def launched(self, slot: Slot) -> None:
        """A collective is issued on the current stream."""

        def write(time_ns: int) -> None:
            self._set(slot, _LAUNCH, time_ns)
            self._set(slot, COLLECTIVE_READY, time_ns)

        self._timeline.mark(write, owner=slot[0])

    def ended(self, slot: Slot, group: int) -> None:
        """The current stream waits for a collective that was issued on ``group``."""

        def write(time_ns: int) -> None:
            segment, offset = slot
            launch_ns: int = INT64.unpack_from(segment.map, offset + _LAUNCH)[0]
            self._set(slot, _START, max(launch_ns, self._last_end_ns.get(group, 0)))
            self._set(slot, COLLECTIVE_END, time_ns)
            self._last_end_ns[group] = time_ns

        self._timeline.mark(write, owner=slot[0])

    def _set(self, slot: Slot, place: int, time_ns: int) -> None:
        segment, offset = slot
        if segment.converted:
            self._spool.count("late_ends")
        else:
            INT64.pack_into(segment.map, offset + place, time_ns)
            segment.keep(offset + place, INT64.size)
