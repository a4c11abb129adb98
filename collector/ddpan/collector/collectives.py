"""Recording collectives: one slot each, written at launch, completed at the end."""

from __future__ import annotations

import itertools
from _thread import get_ident
from collections.abc import Callable
from typing import Final

from .clock import now_ns
from .device_records import DeviceRecords
from .schema import NONE16, NONE32, OPS, POINT_TO_POINT, WAITED
from .segments import (
    COLLECTIVE,
    COLLECTIVE_END,
    COLLECTIVE_FLAGS,
    COLLECTIVE_LAUNCH,
    COLLECTIVE_READY,
    INT64,
    Slot,
    Spool,
)
from .threads import keep_thread_state, kept_threads

__all__ = ["ALL_REDUCE", "OP_CODES", "POINT_TO_POINT_CODES", "Collectives"]

OP_CODES: Final = {name: code for code, name in enumerate(OPS)}
ALL_REDUCE: Final = OP_CODES["all_reduce"]
POINT_TO_POINT_CODES: Final = frozenset(OP_CODES[op] for op in POINT_TO_POINT)

_pack = COLLECTIVE.pack_into
_pack_time = INT64.pack_into
_unpack_time = INT64.unpack_from


class Collectives:
    """Counts and records the collectives of each process group.

    Args:
        spool: where the records go.

    Attributes:
        device: writes the times of collectives that run on a device, None where none does.
    """

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._next_seq: dict[int, Callable[[], int]] = {}
        self._next_point_to_point: dict[int, Callable[[], int]] = {}
        self.device: DeviceRecords | None = None

    def add_group(self, group: int) -> None:
        """Begin to count for a group."""
        self._next_seq.setdefault(group, itertools.count().__next__)
        self._next_point_to_point.setdefault(group, itertools.count().__next__)

    def launch(  # noqa: PLR0917 - keywords cost time on the hot path
        self,
        group: int,
        op: int,
        size_bytes: int,
        launch_ns: int,
        module: int = NONE16,
        step: int = NONE32,
        bucket: int = NONE16,
        layout: int = NONE16,
    ) -> Slot | None:
        """Record the launch of a collective.

        The position in the group's order is counted even where the record is dropped, so that ranks still join.

        Returns:
            where the record lies, or None if it was dropped.
        """
        seq = self._next_seq[group]()
        slot = self._spool.reserve_collective()
        if slot is not None:
            segment, offset = slot
            if segment.converted:
                # Another thread held the interpreter since the reservation, for as long as a part takes to be written.
                self._spool.count("late_ends")
                return None
            _pack(
                segment.map, offset,
                seq, size_bytes, 0, launch_ns, 0, 0, step, group, module, bucket, layout, op, 0, 0, 1,
            )  # fmt: skip
            segment.keep(offset, COLLECTIVE.size)
        return slot

    def launch_point_to_point(self, group: int, op: int, size_bytes: int, launch_ns: int) -> Slot | None:
        """Record the launch of a send or receive, which have an order of their own on each rank of the group."""
        seq = self._next_point_to_point[group]()
        slot = self._spool.reserve_collective()
        if slot is not None:
            segment, offset = slot
            _pack(
                segment.map, offset,
                seq, size_bytes, 0, launch_ns, 0, 0, NONE32, group, NONE16, NONE16, NONE16, op, 0, 0, 1,
            )  # fmt: skip
            segment.keep(offset, COLLECTIVE.size)
        return slot

    def skip(self, group: int) -> None:
        """Count a collective that is not recorded."""
        self._next_seq[group]()

    def end(self, slot: Slot, end_ns: int) -> None:
        """Record the end of a collective."""
        segment, offset = slot
        if segment.converted:
            self._spool.count("late_ends")
            return
        _pack_time(segment.map, offset + COLLECTIVE_END, end_ns)
        segment.keep(offset + COLLECTIVE_END, 8)

    def waited(self, slot: Slot, start_ns: int | None, end_ns: int) -> None:
        """The rank stood still from ``start_ns``, None for the launch, until the end.

        An end that is known already stands; where it was earlier than ``start_ns``, the rank stood still for no time.
        """
        segment, offset = slot
        if segment.converted:
            self._spool.count("late_ends")
            return
        known_ns = _unpack_time(segment.map, offset + COLLECTIVE_END)[0]
        since_ns = _unpack_time(segment.map, offset + COLLECTIVE_LAUNCH)[0] if start_ns is None else start_ns
        # The mark first: a reader in between finds no wait rather than a wait that passes for something else.
        segment.map[offset + COLLECTIVE_FLAGS] |= WAITED
        _pack_time(segment.map, offset + COLLECTIVE_READY, min(since_ns, known_ns or end_ns))
        if known_ns == 0:
            _pack_time(segment.map, offset + COLLECTIVE_END, end_ns)
        segment.keep(offset, COLLECTIVE.size)

    def ender(self, slot: Slot) -> Callable[[object], None]:
        """A callback for a future: records the end when it is called, whatever the argument.

        The callback may have to wait for the interpreter while the training's thread, which saw the collective end,
        goes on; where that thread has noted the end already, its time stands. The end is not kept yet: a system call
        for each is saved where those of a whole backward are kept together.
        """
        segment, offset = slot
        place = offset + COLLECTIVE_END
        count = self._spool.count

        def ended(_future: object) -> None:
            end_ns = now_ns()
            try:
                if get_ident() not in kept_threads:
                    keep_thread_state()
                if segment.converted:
                    count("late_ends")
                elif _unpack_time(segment.map, place)[0] == 0:
                    _pack_time(segment.map, place, end_ns)
            except Exception:  # it may run inside DDP's communication hook, where an exception would end training
                count("errors")

        return ended

    def device_ender(self, slot: Slot, group: int) -> Callable[[object], None]:
        """A callback for a future of a collective on a device, called while the current stream waits for its end."""

        def ended(_future: object) -> None:
            try:
                if self.device is not None:
                    self.device.ended(slot, group)
            except Exception:  # as above
                self._spool.count("errors")

        return ended
