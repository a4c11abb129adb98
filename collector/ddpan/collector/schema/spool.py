"""Layout of the spool, the memory-mapped file that holds events not yet in a Parquet part.

One spool file is one segment: a header of one page, then an array of step records, then an array of collective
records. A record is a row of its table; it counts once its last byte, the commit mark, is set, and fields that become
known later are filled in place. Zero, or `NONE16`/`NONE32` for identifiers, means "not known" and becomes null.

Timestamps in a record are readings of the monotonic clock; the header's ``epoch_offset_ns`` turns them into
nanoseconds since the epoch. Segment ``n`` becomes the parts ``n`` of both tables, so a reader that finds both parts
ignores the segment: each event counts once, whenever the process died.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from .tables import OPS, TABLES, Column

__all__ = [
    "COLLECTIVE_RECORD",
    "COUNTERS",
    "COUNTERS_OFFSET",
    "HEADER_BYTES",
    "NONE16",
    "NONE32",
    "SPOOL_MAGIC",
    "SPOOL_PATTERN",
    "SPOOL_VERSION",
    "STEP_RECORD",
    "WAITED",
    "Spool",
    "SpoolError",
    "columns",
    "pack_header",
    "read_spool",
    "spool_bytes",
]

SPOOL_MAGIC: Final = b"DDPANSPL"
SPOOL_VERSION: Final = 1
SPOOL_PATTERN: Final = "live-*.spool"
HEADER_BYTES: Final = 4096
COUNTERS_OFFSET: Final = 1024
NONE16: Final = 0xFFFF
NONE32: Final = 0xFFFFFFFF
WAITED: Final = 1
"""Bit of ``flags``: the record's ``ready_ns`` is not that but ``wait_start_ns``. No collective has both."""

COUNTERS: Final[tuple[str, ...]] = (
    "errors",
    "dropped_no_segment",
    "dropped_disk_full",
    "dropped_disk_error",
    "late_ends",
    "spool_repairs",
)
"""Counters in the header, 64-bit, cumulative over the process's run; only append to this tuple."""

STEP_RECORD: Final = np.dtype(
    [
        ("data_wait_ns", "<i8"),
        ("forward_start_ns", "<i8"),
        ("forward_end_ns", "<i8"),
        ("compute_end_ns", "<i8"),
        ("backward_end_ns", "<i8"),
        ("optimizer_start_ns", "<i8"),
        ("optimizer_end_ns", "<i8"),
        ("step", "<u4"),
        ("module", "<u2"),
        ("micro_batch", "<u2"),
        ("reserved", "<u4"),
        ("reserved2", "<u2"),
        ("synced", "u1"),
        ("commit", "u1"),
    ]
)

COLLECTIVE_RECORD: Final = np.dtype(
    [
        ("seq", "<u8"),
        ("bytes", "<u8"),
        ("ready_ns", "<i8"),
        ("launch_ns", "<i8"),
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("step", "<u4"),
        ("group", "<u2"),
        ("module", "<u2"),
        ("bucket", "<u2"),
        ("layout", "<u2"),
        ("op", "u1"),
        ("flags", "u1"),
        ("reserved", "u1"),
        ("commit", "u1"),
    ]
)

_SHARED: Final = ("ready_ns", "wait_start_ns")

RECORDS: Final = {"steps": STEP_RECORD, "collectives": COLLECTIVE_RECORD}

# magic, version, header bytes, segment, epoch offset, rank, world size, steps capacity, collectives capacity,
# bytes per step record, bytes per collective record, run, host
_HEADER: Final = struct.Struct("<8sIIQqIIQQII64s256s")

Columns = dict[str, tuple[npt.NDArray[np.generic], npt.NDArray[np.bool_] | None]]


class SpoolError(ValueError):
    """The file is no spool that this version can read; the message says why."""


@dataclass(frozen=True)
class Spool:
    """One segment as read from disk.

    Attributes:
        path: the file.
        segment: number of the segment, equal to the number of the parts made from it.
        run: id of the run.
        host: name of the host.
        rank: global rank.
        world_size: number of ranks of the run.
        counters: counters by name, cumulative at the time of the last event.
        steps: committed step records, dtype `STEP_RECORD`.
        collectives: committed collective records, dtype `COLLECTIVE_RECORD`.
        epoch_offset_ns: nanoseconds to add to a record's timestamp.
        truncated: whether the file is shorter than its header says.
    """

    path: Path
    segment: int
    run: str
    host: str
    rank: int
    world_size: int
    counters: dict[str, int]
    steps: npt.NDArray[np.void]
    collectives: npt.NDArray[np.void]
    epoch_offset_ns: int
    truncated: bool

    def columns(self, table: str) -> Columns:
        """The rows of ``table`` ("steps" or "collectives") as `columns` gives them."""
        records = self.steps if table == "steps" else self.collectives
        return columns(table, records, rank=self.rank, epoch_offset_ns=self.epoch_offset_ns)


def spool_bytes(steps_capacity: int, collectives_capacity: int) -> int:
    """Size of a spool file in bytes."""
    return HEADER_BYTES + steps_capacity * STEP_RECORD.itemsize + collectives_capacity * COLLECTIVE_RECORD.itemsize


def pack_header(
    *,
    segment: int,
    epoch_offset_ns: int,
    rank: int,
    world_size: int,
    steps_capacity: int,
    collectives_capacity: int,
    run: str,
    host: str,
) -> bytes:
    """The header of a new segment, padded to the place where the counters begin."""
    packed = _HEADER.pack(
        SPOOL_MAGIC,
        SPOOL_VERSION,
        HEADER_BYTES,
        segment,
        epoch_offset_ns,
        rank,
        world_size,
        steps_capacity,
        collectives_capacity,
        STEP_RECORD.itemsize,
        COLLECTIVE_RECORD.itemsize,
        run.encode()[:64],
        host.encode()[:256],
    )
    return packed.ljust(COUNTERS_OFFSET, b"\0")


def read_spool(path: Path) -> Spool:
    """Read the committed records of a segment; the process that writes it may be alive.

    Raises:
        SpoolError: the file is too short for a header, no spool, or of a newer version.
        OSError: the file cannot be read.
    """
    data = path.read_bytes()
    if len(data) < HEADER_BYTES:
        raise SpoolError(f"spool {path} is truncated: {len(data)} bytes, less than its header")
    magic, version, _, segment, offset, rank, world, n_steps, n_collectives, step_bytes, collective_bytes, run, host = (
        _HEADER.unpack_from(data)
    )
    if magic != SPOOL_MAGIC:
        raise SpoolError(f"{path} is not a ddpan spool")
    if version > SPOOL_VERSION:
        raise SpoolError(f"spool {path} has version {version}, this ddpan reads up to {SPOOL_VERSION}: upgrade ddpan")
    if (step_bytes, collective_bytes) != (STEP_RECORD.itemsize, COLLECTIVE_RECORD.itemsize):
        raise SpoolError(f"spool {path} has records of {step_bytes} and {collective_bytes} bytes: damaged header")
    counters = np.frombuffer(data, "<i8", len(COUNTERS), COUNTERS_OFFSET)
    return Spool(
        path=path,
        segment=segment,
        run=_text(run),
        host=_text(host),
        rank=rank,
        world_size=world,
        counters=dict(zip(COUNTERS, counters.tolist(), strict=True)),
        steps=_committed(data, STEP_RECORD, HEADER_BYTES, n_steps),
        collectives=_committed(data, COLLECTIVE_RECORD, HEADER_BYTES + n_steps * step_bytes, n_collectives),
        epoch_offset_ns=offset,
        truncated=len(data) < spool_bytes(n_steps, n_collectives),
    )


def columns(table: str, records: npt.NDArray[np.void], *, rank: int, epoch_offset_ns: int) -> Columns:
    """Turn committed records into the columns of ``table``, in the order of `TABLES`.

    Returns:
        for each column its values, shape (n,), and a mask of the same shape that is true where the value is null;
        None in place of the mask where the column cannot be null. ``op`` comes as the position in `OPS`.
    """
    return {c.name: _column(c, records, rank, epoch_offset_ns) for c in TABLES[table]}


def _column(
    column: Column, records: npt.NDArray[np.void], rank: int, epoch_offset_ns: int
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.bool_] | None]:
    if column.name == "rank":
        return np.full(len(records), rank, np.uint32), None
    if column.name in _SHARED:
        return _shared(column.name, records, epoch_offset_ns)
    values = np.ascontiguousarray(records[column.name])
    if column.dtype == "bool":
        return values.astype(np.bool_), None
    if column.dtype == "enum":
        return np.where(values < len(OPS), values, 0), None
    missing = _missing(column, values) if column.nullable else None
    if column.timestamp:
        values = values + epoch_offset_ns
    return values, missing


def _shared(
    name: str, records: npt.NDArray[np.void], epoch_offset_ns: int
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.bool_]]:
    """One of the two columns that share the field ``ready_ns``."""
    values = np.ascontiguousarray(records["ready_ns"])
    waited = (records["flags"] & WAITED) != 0
    return values + epoch_offset_ns, (values == 0) | (waited != (name == "wait_start_ns"))


def _missing(column: Column, values: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    absent = {"u16": NONE16, "u32": NONE32}.get(column.dtype, 0)
    return np.asarray(values == absent)


def _committed(data: bytes, record: np.dtype[np.void], offset: int, capacity: int) -> npt.NDArray[np.void]:
    there = max(0, min(capacity, (len(data) - offset) // record.itemsize))
    records = np.frombuffer(data, record, there, min(offset, len(data)))
    return np.compress(records["commit"] == 1, records)


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")
