"""Writing the spool: memory-mapped segments of fixed-size records, reserved by counting, filled in place.

A reservation is one ``next`` of an `itertools.count`, which the interpreter lock makes atomic, so threads that launch
and threads that finish collectives need no lock of ours. The kernel owns the mapped pages: what was written is in the
file, even if the process is killed at the next instruction.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from .messages import warn_once
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
    "segment_name",
]

STEP: Final = struct.Struct("<7qIHHIHBB")
COLLECTIVE: Final = struct.Struct("<QQqqqqIHHHHBBBB")
INT64: Final = struct.Struct("<q")
STEP_FIELDS: Final = {name: STEP_RECORD.fields[name][1] for name in STEP_RECORD.names}  # type: ignore[index, union-attr]
COLLECTIVE_GROUP: Final[int] = COLLECTIVE_RECORD.fields["group"][1]  # type: ignore[index]
COLLECTIVE_FLAGS: Final[int] = COLLECTIVE_RECORD.fields["flags"][1]  # type: ignore[index]
COLLECTIVE_LAUNCH: Final[int] = COLLECTIVE_RECORD.fields["launch_ns"][1]  # type: ignore[index]
COLLECTIVE_LAYOUT: Final[int] = COLLECTIVE_RECORD.fields["layout"][1]  # type: ignore[index]
COLLECTIVE_READY: Final[int] = COLLECTIVE_RECORD.fields["ready_ns"][1]  # type: ignore[index]
COLLECTIVE_END: Final[int] = COLLECTIVE_RECORD.fields["end_ns"][1]  # type: ignore[index]


def segment_name(number: int) -> str:
    """Name of a segment's file inside its rank's folder."""
    return f"live-{number:06d}.spool"


class Segment:
    """One spool file, mapped for writing.

    Attributes:
        path: the file.
        number: the segment's number, and that of the parts made from it.
        map: the mapped bytes.
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
        self.map = _map_file(path, spool_bytes(steps, collectives), header)


Slot = tuple[Segment, int]
"""Where a record lies: its segment and the offset of its first byte."""


def _map_file(path: Path, size: int, header: bytes) -> mmap.mmap:
    """Make a file and map it; it has its name only once its header is there, so no reader meets half of one."""
    draft = path.with_name(f".{path.name}.tmp")
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        # A hole in the file would become SIGBUS when the disk is full, so the space is taken now.
        os.posix_fallocate(descriptor, 0, size)
        os.pwrite(descriptor, header, 0)
        mapped = mmap.mmap(descriptor, size)
        draft.rename(path)
        return mapped
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


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
        INT64.pack_into(self.current.map, COUNTERS_OFFSET + 8 * COUNTERS.index(name), self.counts[name])

    def prepare_spare(self) -> None:
        """Make the next segment ahead of need; called by the background thread."""
        if self.spare is None and not self._stopped:
            try:
                self.spare = self._new_segment()
                self._why_dropped = "dropped_no_segment"
            except OSError as error:
                self._lost_disk(error)

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
            begin = COUNTERS_OFFSET
            spare.map[begin : begin + 8 * len(COUNTERS)] = seen.map[begin : begin + 8 * len(COUNTERS)]
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
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        self._why_dropped = "dropped_disk_full" if full else "dropped_disk_error"
        why = "the disk is full" if full else f"{error.strerror or error}"
        warn_once("segment", f"cannot write to {self.folder}: {why}. Recording pauses, training goes on.")
