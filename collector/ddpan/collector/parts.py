"""The background thread: full segments become Parquet parts, metadata goes to ``live.json``.

pyarrow writes the parts because it leaves forked children alone (the thread pool of polars deadlocks a child that uses
polars, such as a DataLoader worker), packs timestamps as deltas and works outside the interpreter lock.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from .messages import warn_disk, warn_once
from .retention import Retention
from .schema import (
    COLLECTIVE_RECORD,
    HEADER_BYTES,
    LIVE_METADATA,
    METADATA_KEY,
    OPS,
    STEP_RECORD,
    TABLES,
    Column,
    Metadata,
    columns,
    part_name,
)
from .segments import Segment, Spool

if TYPE_CHECKING:
    import pyarrow

__all__ = ["PartWriter", "committed_records", "write_part"]

COMPRESSION_LEVEL: Final = 9
ROW_GROUP_ROWS: Final = 32768
LATE_END_GRACE_NS: Final = 600_000_000_000
"""How long a full segment waits for a collective that has not ended, before it becomes parts without that end."""


def committed_records(segment: Segment, table: str) -> npt.NDArray[np.void]:
    """A copy of the committed records of ``segment``, shape (n,), dtype of the table's record."""
    if table == "steps":
        everything = np.frombuffer(segment.map, STEP_RECORD, segment.steps_capacity, HEADER_BYTES)
    else:
        everything = np.frombuffer(
            segment.map, COLLECTIVE_RECORD, segment.collectives_capacity, segment.collectives_offset
        )
    return np.compress(everything["commit"] == 1, everything)


def write_part(
    path: Path, table: str, records: npt.NDArray[np.void], metadata: Metadata, *, epoch_offset_ns: int
) -> None:
    """Write one part: under a temporary name, synced to disk, then renamed.

    Raises:
        OSError: the part cannot be written.
    """
    import pyarrow.parquet

    arrays = {
        column.name: _array(column, *values)
        for column, values in zip(
            TABLES[table],
            columns(table, records, rank=metadata["rank"], epoch_offset_ns=epoch_offset_ns).values(),
            strict=True,
        )
    }
    content = pyarrow.table(arrays).replace_schema_metadata({METADATA_KEY: json.dumps(metadata, separators=(",", ":"))})
    delta = [c.name for c in TABLES[table] if c.dtype in ("i64", "u64", "u32") and c.name not in ("rank", "bytes")]
    with _draft_of(path) as draft, draft.open("wb") as file:
        pyarrow.parquet.write_table(
            content,
            file,
            compression="zstd",
            compression_level=COMPRESSION_LEVEL,
            row_group_size=ROW_GROUP_ROWS,
            use_dictionary=[c.name for c in TABLES[table] if c.name not in delta and c.dtype != "bool"],
            column_encoding=dict.fromkeys(delta, "DELTA_BINARY_PACKED"),
        )
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _draft_of(path: Path) -> Iterator[Path]:
    """A name to write a file under, which takes the place of ``path`` if that succeeds and goes if not."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield draft
        draft.rename(path)
    except OSError:
        # On a full disk half a file would be in the way of what comes next.
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def _array(column: Column, values: npt.NDArray[Any], missing: npt.NDArray[np.bool_] | None) -> pyarrow.Array:
    import pyarrow

    if column.dtype == "enum":
        return pyarrow.DictionaryArray.from_arrays(pyarrow.array(values.astype(np.int8)), pyarrow.array(OPS))
    return pyarrow.array(values, mask=missing)


class PartWriter:
    """Owns the background thread of one recording.

    Args:
        spool: whose full segments are converted.
        metadata: gives the log's metadata for a table and part, ``(None, None)`` for ``live.json``.
        closed_rows: whether no row of the segment can still change, its collectives' ends aside.
        keep: keeps what is known of rows that are not complete.
        retention: keeps the log within its limit, None where it has none.
        clock: monotonic clock in nanoseconds.
    """

    def __init__(
        self,
        spool: Spool,
        *,
        metadata: Callable[[str | None, int | None, bool], Metadata],
        closed_rows: Callable[[Segment], bool],
        keep: Callable[[], None],
        retention: Retention | None,
        clock: Callable[[], int],
        wake: threading.Event,
    ) -> None:
        self._spool = spool
        self._metadata = metadata
        self._closed_rows = closed_rows
        self._keep = keep
        self._retention = retention
        self._clock = clock
        self._wake = wake
        self._stopping = False
        self.metadata_changed = True
        self._thread = threading.Thread(target=self._run, name="ddpan-parts", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, *, timeout: float = 60.0) -> None:
        """Convert what is left and end the thread; what takes longer than ``timeout`` seconds stays in the spool."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stopping:
            self._guarded(self._round)
            self._wake.wait(1.0)
            self._wake.clear()
        self._guarded(self._spool.say_losses)
        self._guarded(self._spool.close)
        self._guarded(self._finish)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except ImportError:
            warn_once("pyarrow", "pyarrow is not installed: the log stays in its spool form, which ddpan reads as well")
        except OSError as error:
            warn_disk(self._spool.folder, error)
        except Exception as error:  # the thread must outlive any mistake of ours
            self._spool.count("errors")
            warn_once("thread", f"internal error in the background thread: {error!r}. Training goes on.")

    def _round(self) -> None:
        # One may fail where another does not, as where a folder can be written to no more but files in it can.
        spool = self._spool
        works = (self._mend, self._keep, spool.prepare_spare, spool.say_losses, self._refresh_live, self._convert_full)
        for work in works:
            self._guarded(work)

    def _mend(self) -> None:
        if self._spool.mend():
            self.metadata_changed = True

    def _refresh_live(self) -> None:
        if self.metadata_changed:
            self.metadata_changed = False
            self._try_live()

    def _convert_full(self) -> None:
        for segment in list(self._spool.full):
            if not self._is_final(segment):
                break
            self._convert(segment, last=False)

    def _finish(self) -> None:
        for segment in list(self._spool.full):
            self._convert(segment, last=segment is self._spool.full[-1])
        (self._spool.folder / LIVE_METADATA).unlink(missing_ok=True)

    def _is_final(self, segment: Segment) -> bool:
        """Whether every collective ended and no step row is still open, or the grace is over."""
        waited_ns = self._clock() - (segment.full_since_ns or 0)
        if waited_ns > LATE_END_GRACE_NS:
            return True
        if not self._closed_rows(segment):
            return False
        return bool((committed_records(segment, "collectives")["end_ns"] != 0).all())

    def _convert(self, segment: Segment, *, last: bool) -> None:
        segment.converted = True
        for table in ("collectives", "steps"):
            write_part(
                self._spool.folder / part_name(table, segment.number),
                table,
                committed_records(segment, table),
                self._metadata(table, segment.number, last),
                epoch_offset_ns=self._spool.epoch_offset_ns,
            )
        segment.path.unlink(missing_ok=True)
        self._spool.full.remove(segment)
        if self._retention is not None:
            self._retention.added(segment.number, last=last)

    def _try_live(self) -> None:
        try:
            self._write_live()
        except OSError:
            # The next round tries again.
            self.metadata_changed = True
            raise

    def _write_live(self) -> None:
        with _draft_of(self._spool.folder / LIVE_METADATA) as draft:
            draft.write_text(json.dumps(self._metadata(None, None, False)))
