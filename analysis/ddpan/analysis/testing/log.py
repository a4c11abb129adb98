"""Writing a simulated run as a log folder, just as a recorder leaves it."""

from __future__ import annotations

import json
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from ddpan.collector.schema import (
    COLLECTIVE_RECORD,
    LIVE_METADATA,
    METADATA_KEY,
    NONE16,
    NONE32,
    OPS,
    STEP_RECORD,
    TABLES,
    WAITED,
    Metadata,
    pack_header,
    part_name,
    rank_folder,
    spool_bytes,
)

from .simulation import SyntheticRun

__all__ = ["WritePart", "records", "write_log", "write_part", "write_spool"]

WritePart = Callable[[Path, str, pl.DataFrame, Metadata], None]
_RECORDS: Final = {"steps": STEP_RECORD, "collectives": COLLECTIVE_RECORD}


def write_part(path: Path, table: str, rows: pl.DataFrame, metadata: Metadata) -> None:
    """Write one Parquet part with its metadata; ``table`` is "steps" or "collectives"."""
    plain = rows.cast({"op": pl.String}) if table == "collectives" else rows
    plain.write_parquet(path, metadata={METADATA_KEY: json.dumps(metadata)})


def write_log(
    run: SyntheticRun,
    path: str | PathLike[str],
    *,
    steps_per_part: int = 1000,
    spool: bool = False,
    write: WritePart = write_part,
) -> Path:
    """Write ``run`` below ``path`` in the log format.

    Args:
        run: the simulated run.
        path: the log folder, made if need be.
        steps_per_part: steps in each part.
        spool: leave the last part of each rank as a spool, as after a kill.
        write: writes a part.

    Returns:
        the run's folder.
    """
    folder = Path(path) / run.scenario.run
    tables = {"steps": run.steps, "collectives": run.collectives}
    ranks = {name: frame.partition_by("rank", as_dict=True) for name, frame in tables.items()}
    parts = -(-run.scenario.steps // steps_per_part)
    for rank, metadata in run.metadata.items():
        home = folder / rank_folder(rank)
        home.mkdir(parents=True, exist_ok=True)
        own = {name: ranks[name].get((rank,), frame.clear()) for name, frame in tables.items()}
        for number in range(parts):
            rows = {name: frame.filter(_within(frame, number, steps_per_part)) for name, frame in own.items()}
            if spool and number == parts - 1:
                write_spool(home, number, rows, {**metadata, "closed": False})
            else:
                _write_parts(home, number, rows, {**metadata, "closed": number == parts - 1}, write)
    return folder


def _within(rows: pl.DataFrame, part: int, steps_per_part: int) -> pl.Series:
    """Which of a rank's rows belong to a part; those of no step come with the step during which they were launched."""
    step = rows["step"]
    if step.null_count():
        order = rows["launch_ns"].arg_sort(nulls_last=True)
        last_begun = step.gather(order).forward_fill().fill_null(0)
        step = last_begun.gather(order.arg_sort())
    return step.is_between(part * steps_per_part, (part + 1) * steps_per_part, closed="left")


def _write_parts(
    folder: Path, number: int, rows: dict[str, pl.DataFrame], metadata: Metadata, write: WritePart
) -> None:
    for name in TABLES:
        write(folder / part_name(name, number), name, rows[name], {**metadata, "table": name, "part": number})


def write_spool(folder: Path, segment: int, rows: dict[str, pl.DataFrame], metadata: Metadata) -> Path:
    """Write a spool with all of ``rows`` committed, and ``live.json`` beside it."""
    content = {name: records(name, rows[name]) for name in TABLES}
    sizes = {f"{name}_capacity": len(content[name]) + 16 for name in TABLES}
    header = pack_header(
        segment=segment,
        epoch_offset_ns=0,
        rank=metadata["rank"],
        world_size=metadata["world_size"],
        run=metadata["run"],
        host=metadata["host"],
        **sizes,
    )
    path = folder / f"live-{segment:06d}.spool"
    data = bytearray(spool_bytes(**sizes))
    data[: len(header)] = header
    begin = len(data) - sum(sizes[f"{name}_capacity"] * _RECORDS[name].itemsize for name in TABLES)
    for name in TABLES:
        packed = content[name].tobytes()
        data[begin : begin + len(packed)] = packed
        begin += sizes[f"{name}_capacity"] * _RECORDS[name].itemsize
    path.write_bytes(data)
    (folder / LIVE_METADATA).write_text(json.dumps(metadata))
    return path


def records(table: str, rows: pl.DataFrame) -> npt.NDArray[Any]:
    """Committed spool records of ``rows``, their times since the epoch; shape (rows,)."""
    packed = np.zeros(rows.height, _RECORDS[table])
    packed["commit"] = 1
    for column in TABLES[table]:
        if column.name == "rank" or column.name not in rows.columns:
            continue
        if column.name == "wait_start_ns":
            waited = rows[column.name].is_not_null().to_numpy()
            packed["ready_ns"][waited] = rows[column.name].drop_nulls().to_numpy()
            packed["flags"][waited] |= WAITED
            continue
        absent = {"u16": NONE16, "u32": NONE32}.get(column.dtype, 0)
        values = rows[column.name]
        if column.dtype == "enum":
            values = values.cast(pl.Enum(OPS)).to_physical()
        packed[column.name] = (values.fill_null(absent) if column.nullable else values).to_numpy()
    return packed
