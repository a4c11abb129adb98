"""Writing the spool: memory-mapped segments of fixed-size records, reserved by counting, filled in place.

A reservation is one ``next`` of an `itertools.count`, which the interpreter lock makes atomic, so threads that launch
and threads that finish collectives need no lock of ours. A record is packed into the segment's memory and kept: the
kernel has it then, even if the process is killed at the next instruction.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import numpy as np

from .backing import Backing
from .messages import is_full, warn_disk, warn_once
from .schema import (
    COLLECTIVE_RECORD,
    COUNTERS,
    COUNTERS_OFFSET,
    HEADER_BYTES,
    STEP_RECORD,
    pack_header,
    spool_bytes,
)

__all__ = [
    "COLLECTIVE",
    "COLLECTIVE_END",
    "COLLECTIVE_FLAGS",
    "COLLECTIVE_GROUP",
    "COLLECTIVE_LAUNCH",
    "COLLECTIVE_LAYOUT",
    "COLLECTIVE_READY",
    "INT64",
    "STEP",
    "STEP_FIELDS",
    "Segment",
    "Slot",
    "Spool",
    "keep_collectives",
    "segment_name",
]

STEP: Final = struct.Struct("<7qIHHIHBB")
COLLECTIVE: Final = struct.Struct("<QQqqqqIHHHHBBBB")
INT64: Final = struct.Struct("<q")


def _offsets(record: np.dtype[np.void]) -> dict[str, int]:
    """Where each field of a record begins, in bytes."""
    return {name: offset for name, (_, offset, *_) in (record.fields or {}).items()}


STEP_FIELDS: Final = _offsets(STEP_RECORD)
_COLLECTIVE_FIELDS: Final = _offsets(COLLECTIVE_RECORD)
COLLECTIVE_GROUP: Final = _COLLECTIVE_FIELDS["group"]
COLLECTIVE_FLAGS: Final = _COLLECTIVE_FIELDS["flags"]
COLLECTIVE_LAUNCH: Final = _COLLECTIVE_FIELDS["launch_ns"]
COLLECTIVE_LAYOUT: Final = _COLLECTIVE_FIELDS["layout"]
COLLECTIVE_READY: Final = _COLLECTIVE_FIELDS["ready_ns"]
COLLECTIVE_END: Final = _COLLECTIVE_FIELDS["end_ns"]


def segment_name(number: int) -> str:
    """Name of a segment's file inside its rank's folder."""
    return f"live-{number:06d}.spool"


class Segment:
    """One spool file and its memory.

    Attributes:
        path: the file.
        number: the segment's number, and that of the parts made from it.
        map: the memory.
        keep: copies a number of bytes at an offset of the memory into the file.
        converted: whether parts were made from it; what is written later is lost.
        full_since_ns: monotonic time at which the next segment took over, or None.
    """

    def __init__(self, path: Path, number: int, *, steps: int, collectives: int, header: bytes) -> None:
        self.path = path
        self.number = number
        self.steps_capacity = steps
        self.collectives_capacity = collectives
        self.collectives_offset = HEADER_BYTES + steps * STEP_RECORD.itemsize
        self.next_step = itertools.count().__next__
        self.next_collective = itertools.count().__next__
        self.converted = False
        self.full_since_ns: int | None = None
        self.backing = Backing(path, spool_bytes(steps, collectives), header)
        self.map = self.backing.map
        self.keep = self.backing.keep


Slot = tuple[Segment, int]
"""Where a record lies: its segment and the offset of its first byte."""


def keep_collectives(slots: Iterable[Slot | None]) -> None:
    """Keep collective records that were changed; those that lie together in one call."""
    spans: dict[Segment, tuple[int, int]] = {}
    for segment, offset in filter(None, slots):
        begin, end = spans.get(segment, (offset, offset))
        spans[segment] = min(begin, offset), max(end, offset)
    for segment, (begin, end) in spans.items():
        segment.keep(begin, end - begin + COLLECTIVE.size)


class Spool:
    """The segments of one rank: the current one, a spare one made ahead, and full ones waiting to become parts.

    Args:
        folder: the rank's folder, which exists.
        epoch_offset_ns: nanoseconds from the monotonic clock to the epoch.
        identity: ``rank``, ``world_size``, ``run`` and ``host`` for the headers.
        steps: step records per segment.
        collectives: collective records per segment.
        clock: monotonic clock in nanoseconds.
        wake: called when there is work for the background thread.

    Raises:
        OSError: the first segment cannot be made.
    """

    def __init__(
        self,
        folder: Path,
        *,
        epoch_offset_ns: int,
        identity: dict[str, object],
        steps: int,
        collectives: int,
        clock: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        self.folder = folder
        self.epoch_offset_ns = epoch_offset_ns
        self.full: list[Segment] = []
        self.spare: Segment | None = None
        self.counts = dict.fromkeys(COUNTERS, 0)
        self._identity = identity
        self._steps = steps
        self._collectives = collectives
        self._clock = clock
        self._wake = wake
        self._turn = threading.Lock()
        self._numbers = itertools.count()
        self._stopped = False
        self._why_dropped = "dropped_no_segment"
        self.current = self._new_segment()

    def reserve_step(self) -> Slot | None:
        """A place for a step record, or None, counted as dropped, where there is none."""
        segment = self.current
        index = segment.next_step()
        if index < segment.steps_capacity:
            return segment, HEADER_BYTES + index * 72
        return self.reserve_step() if self._turn_over(segment) else None

    def reserve_collective(self) -> Slot | None:
        """A place for a collective record, or None, counted as dropped, where there is none."""
        segment = self.current
        index = segment.next_collective()
        if index < segment.collectives_capacity:
            return segment, segment.collectives_offset + index * 64
        return self.reserve_collective() if self._turn_over(segment) else None

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter, in memory and in the header of the current segment."""
        self.counts[name] += amount
        place = COUNTERS_OFFSET + 8 * COUNTERS.index(name)
        INT64.pack_into(self.current.map, place, self.counts[name])
        self.current.keep(place, INT64.size)

    def prepare_spare(self) -> None:
        """Make the next segment ahead of need; called by the background thread."""
        if self.spare is None and not self._stopped:
            try:
                self.spare = self._new_segment()
                self._why_dropped = "dropped_no_segment"
            except OSError as error:
                self._lost_disk(error)

    def say_losses(self) -> None:
        """Warn of events that found no segment, once; called by the background thread, which may wait for stderr."""
        if self.counts["dropped_no_segment"]:
            warn_once(
                "no segment",
                f"events come faster than {self.folder} takes them: some are lost, and counted. "
                "A larger DDPAN_SEGMENT_COLLECTIVES helps; training goes on.",
            )

    def mend(self) -> bool:
        """Write files anew that were damaged or removed from outside; called by the background thread.

        Returns:
            whether there were any.

        Raises:
            OSError: a file cannot be written.
        """
        spare = [] if self.spare is None else [self.spare]
        damaged = [s for s in (*self.full, self.current, *spare) if not s.converted and not s.backing.is_whole()]
        if damaged and self.folder.parents[1].is_dir():
            # The user's folder is not made again, what the recorder made inside it is.
            self.folder.mkdir(parents=True, exist_ok=True)
        for segment in damaged:
            segment.backing.mend()
            self.count("spool_repairs")
            warn_once(
                "spool",
                f"{segment.path} was damaged or removed by somebody else. It is written anew from memory; "
                "training goes on.",
            )
        return bool(damaged)

    def close(self) -> None:
        """Stop taking records; the current segment becomes the last full one, the spare goes."""
        with self._turn:
            self._stopped = True
            spare, self.spare = self.spare, None
            if self.current.full_since_ns is None:
                self.current.full_since_ns = self._clock()
                self.full.append(self.current)
        if spare is not None:
            spare.path.unlink(missing_ok=True)

    def _turn_over(self, seen: Segment) -> bool:
        """Replace the full segment ``seen`` by the spare one; false, and counted, where there is no spare."""
        with self._turn:
            if self.current is not seen:
                return True
            if self.spare is None or self._stopped:
                self.count(self._why_dropped)
                self._wake()
                return False
            spare, self.spare = self.spare, None
            # A part carries the counters of its segment's header, which are cumulative.
            begin, size = COUNTERS_OFFSET, 8 * len(COUNTERS)
            spare.map[begin : begin + size] = seen.map[begin : begin + size]
            spare.keep(begin, size)
            seen.full_since_ns = self._clock()
            self.full.append(seen)
            self.current = spare
        self._wake()
        return True

    def _new_segment(self) -> Segment:
        number = next(self._numbers)
        header = pack_header(
            segment=number,
            epoch_offset_ns=self.epoch_offset_ns,
            steps_capacity=self._steps,
            collectives_capacity=self._collectives,
            **self._identity,  # type: ignore[arg-type]
        )
        path = self.folder / segment_name(number)
        try:
            return Segment(path, number, steps=self._steps, collectives=self._collectives, header=header)
        except OSError:
            self._numbers = itertools.count(number)
            raise

    def _lost_disk(self, error: OSError) -> None:
        self._why_dropped = "dropped_disk_full" if is_full(error) else "dropped_disk_error"
        warn_disk(self.folder, error)
