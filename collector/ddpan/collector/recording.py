"""One recording: one life of one default process group, on one rank."""

from __future__ import annotations

import importlib.metadata
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from .clock import Anchor, now_ns
from .collectives import Collectives
from .device_records import DeviceRecords
from .device_time import DeviceEvents, DeviceTimeline
from .identity import Identity
from .parts import PartWriter
from .retention import Retention
from .schema import (
    COUNTERS,
    SCHEMA_VERSION,
    Counters,
    GroupInfo,
    Metadata,
    ModuleInfo,
    rank_folder,
    spool_bytes,
)
from .segments import COLLECTIVE_GROUP, Slot, Spool
from .settings import Settings
from .steps import StepRecorder

__all__ = ["Recording"]

FIRST_OWN_GROUP: Final = 32768


class Recording:
    """Everything that is recorded of one run on one rank.

    Args:
        settings: the user's choices.
        identity: who this rank is.
        anchor: the clock's anchor.
        tap: name of the way in which collectives are seen.
        torch_version: for the metadata.

    Raises:
        OSError: the rank's folder or the first segment cannot be made.
    """

    def __init__(
        self, settings: Settings, identity: Identity, *, anchor: Anchor, tap: str, torch_version: str, device: str
    ) -> None:
        self.settings = settings
        self.identity = identity
        self.anchor = anchor
        self.tap = tap
        self.device = device
        self._device_records: DeviceRecords | None = None
        self.groups: dict[int, GroupInfo] = {}
        self.modules: dict[int, ModuleInfo] = {}
        self.folder: Path = settings.log_dir.absolute() / identity.run / rank_folder(identity.rank)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._versions = {
            "ddpan": importlib.metadata.version("ddpan"),
            "torch": torch_version,
            "python": platform.python_version(),
        }
        wake = threading.Event()
        self.spool = Spool(
            self.folder,
            epoch_offset_ns=anchor.offset_ns,
            identity={
                "rank": identity.rank,
                "world_size": identity.world_size,
                "run": identity.run,
                "host": identity.host,
            },
            steps=settings.segment_steps,
            collectives=settings.segment_collectives,
            clock=now_ns,
            wake=wake.set,
        )
        self.collectives = Collectives(self.spool)
        self.steps = StepRecorder(self.spool, selection=settings.steps)
        segment_bytes = spool_bytes(settings.segment_steps, settings.segment_collectives)
        limit = settings.limit
        self._retention = None if limit is None else Retention(self.folder, limit, segment_bytes=segment_bytes)
        self._writer = PartWriter(
            self.spool,
            metadata=self.metadata,
            closed_rows=self.steps.rows_closed,
            keep=self.steps.keep,
            retention=self._retention,
            clock=now_ns,
            wake=wake,
        )

    def use_device(self, name: str, events: DeviceEvents) -> None:
        """From now on record times of a device as well; nothing where that is so already."""
        if self._device_records is None:
            self._device_records = DeviceRecords(DeviceTimeline(events, clock=now_ns), self.spool)
            self.collectives.device = self.steps.device = self._device_records
            self.device = name
            self.metadata_changed()

    def launched(self, slot: Slot) -> None:
        """A collective was issued; if it runs on a device, its stream will tell when it got there."""
        if self._device_records is not None and self.runs_on_device(slot):
            self._device_records.launched(slot)

    def ended(self, slot: Slot) -> None:
        """A collective is over, or on a device the current stream waits for its end."""
        if self._device_records is not None and self.runs_on_device(slot):
            self._device_records.ended(slot, self._group(slot))
        else:
            self.collectives.end(slot, now_ns())

    def ender(self, slot: Slot) -> Callable[[object], None]:
        """What a collective's future shall call: it records the end, on the device or on the host."""
        if not self.runs_on_device(slot):
            return self.collectives.ender(slot)
        return self.collectives.device_ender(slot, self._group(slot))

    def runs_on_device(self, slot: Slot) -> bool:
        """Whether the times of this collective are a device's."""
        return self._device_records is not None and "nccl" in self.groups[self._group(slot)]["backend"]

    def _group(self, slot: Slot) -> int:
        segment, offset = slot
        return int.from_bytes(segment.map[offset + COLLECTIVE_GROUP : offset + COLLECTIVE_GROUP + 2], "little")

    def start(self) -> None:
        """Begin to write parts in the background."""
        self._writer.start()

    def stop(self) -> None:
        """Write what is left and end; a device gets a moment to pass the last events."""
        if self._device_records is not None:
            for _ in range(100):
                self._device_records.poll()
                if not any(self._device_records.owes(s) for s in (*self.spool.full, self.spool.current)):
                    break
                time.sleep(0.01)
        self._writer.stop()

    def add_group(self, *, name: str, ranks: list[int], backend: str) -> int:
        """Number a process group, the same way on all its ranks.

        c10d names groups by counting them, on members and others alike, so the name serves as the number. Groups
        with other names are numbered from `FIRST_OWN_GROUP` on, in order of their first collective on this rank.
        """
        counted = int(name) if name.isdigit() else FIRST_OWN_GROUP
        number = counted if counted < FIRST_OWN_GROUP and counted not in self.groups else self._next_own_group()
        self.groups[number] = GroupInfo(name=name, ranks=ranks, backend=backend)
        self.collectives.add_group(number)
        self.metadata_changed()
        return number

    def add_module(self, number: int, info: ModuleInfo) -> None:
        """Describe a DDP module in the metadata."""
        self.modules[number] = info
        self.metadata_changed()

    def metadata_changed(self) -> None:
        """Have ``live.json`` written anew, soon."""
        self._writer.metadata_changed = True

    def metadata(self, table: str | None, part: int | None, closed: bool) -> Metadata:
        """The log's metadata as of now."""
        me = self.identity
        return Metadata(
            schema_version=SCHEMA_VERSION,
            table=table,
            part=part,
            run=me.run,
            rank=me.rank,
            local_rank=me.local_rank,
            world_size=me.world_size,
            host=me.host,
            pid=me.pid,
            device=self.device,
            backend=me.backend,
            tap=self.tap,
            versions=self._versions,
            job=me.job,
            clock=self.anchor.as_metadata(),
            groups={str(number): group for number, group in self.groups.items()},
            modules={str(number): module for number, module in self.modules.items()},
            layouts={
                str(state.number): {str(x.number): x.as_metadata(state.names) for x in state.layouts}
                for state in self.steps.modules
            },
            counters=self._counters(),
            settings=self.settings.as_metadata(),
            closed=closed,
        )

    def _next_own_group(self) -> int:
        return max([FIRST_OWN_GROUP - 1, *self.groups]) + 1

    def _counters(self) -> Counters:
        counts = self.spool.counts
        return Counters(
            dropped={name.removeprefix("dropped_"): counts[name] for name in COUNTERS if name.startswith("dropped_")},
            errors=counts["errors"],
            late_ends=counts["late_ends"],
            removed_parts=0 if self._retention is None else self._retention.removed,
            spool_repairs=counts["spool_repairs"],
        )
