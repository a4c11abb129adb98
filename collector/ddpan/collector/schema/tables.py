"""The two tables of a ddpan log, column by column.

This module is the contract between the collector, which writes the tables, and the analysis, which reads them.
It imports neither torch nor polars nor pyarrow, so that both sides can afford it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["COLLECTIVES", "OPS", "POINT_TO_POINT", "SCHEMA_VERSION", "STEPS", "TABLES", "Column"]

SCHEMA_VERSION: Final = 1
"""Version of the log format. A reader refuses a log with a larger one."""

OPS: Final[tuple[str, ...]] = (
    "unknown",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "all_to_all",
    "barrier",
    "gather",
    "scatter",
    "send",
    "recv",
)
"""Values of the column ``op``; the spool stores the position in this tuple, so only append to it."""

POINT_TO_POINT: Final = ("send", "recv")
"""Operations of two ranks of a group: they have an order of their own on each rank, as in the group's they would shift
all that follows on these two."""


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        name: name in the Parquet file.
        dtype: ``u16``, ``u32``, ``u64``, ``i64``, ``bool`` or ``enum`` (a string out of `OPS`).
        nullable: whether a null can occur; a null means "not known" or "does not apply".
        timestamp: whether the value is nanoseconds since the Unix epoch on the rank's own clock.
        meaning: one sentence for the documentation.
    """

    name: str
    dtype: str
    nullable: bool
    meaning: str
    timestamp: bool = False


def _time(name: str, meaning: str, *, nullable: bool = True) -> Column:
    return Column(name, "i64", nullable, meaning, timestamp=True)


STEPS: Final[tuple[Column, ...]] = (
    Column("rank", "u32", False, "global rank"),
    Column("module", "u16", False, "which DDP module of the process"),
    Column("step", "u32", False, "counted per module; a step ends with a synchronised backward"),
    Column("micro_batch", "u16", False, "position of this forward within its step"),
    Column("synced", "bool", False, "this forward's backward reduces gradients"),
    Column("data_wait_ns", "i64", False, "time inside the DataLoader's __next__ since the last forward"),
    _time("forward_start_ns", "start of the module's forward, broadcast of buffers included", nullable=False),
    _time("forward_end_ns", "end of the module's forward"),
    _time("compute_end_ns", "the last gradient is ready"),
    _time("backward_end_ns", "all buckets are reduced and copied back"),
    _time("optimizer_start_ns", "start of optimizer.step(), on the step's last micro-batch"),
    _time("optimizer_end_ns", "end of optimizer.step(), on the step's last micro-batch"),
)

COLLECTIVES: Final[tuple[Column, ...]] = (
    Column("rank", "u32", False, "global rank"),
    Column("group", "u16", False, "process group; its ranks are in the metadata"),
    Column("seq", "u64", False, "position in the group's order, counted by the recorder: the join key across ranks"),
    Column("op", "enum", False, "kind of collective"),
    Column("module", "u16", True, "DDP module of the bucket; null for other collectives"),
    Column("step", "u32", True, "step of the bucket; null for other collectives"),
    Column("bucket", "u16", True, "index of the bucket; null for other collectives"),
    Column("layout", "u16", True, "grows when DDP rebuilds its buckets; null for other collectives"),
    Column("bytes", "u64", False, "payload of this rank's input"),
    _time("ready_ns", "the bucket's last gradient was ready, before the in-order queue"),
    _time("launch_ns", "the collective was issued", nullable=False),
    _time("start_ns", "start on the device; null where unknown, as with gloo"),
    _time("end_ns", "end, on the device for CUDA and on the host for gloo; null if it was never seen to end"),
    _time("wait_start_ns", "from here to the end the rank stood still and waited; null where it was not seen to wait"),
)

TABLES: Final[dict[str, tuple[Column, ...]]] = {"steps": STEPS, "collectives": COLLECTIVES}
