"""The way of a record: spool, columns, Parquet part, data frame. Every value and every null arrives as it was."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpan.collector.parts import write_part
from ddpan.collector.schema import (
    COLLECTIVE_RECORD,
    COUNTERS,
    COUNTERS_OFFSET,
    HEADER_BYTES,
    METADATA_KEY,
    NONE16,
    NONE32,
    OPS,
    STEP_RECORD,
    TABLES,
    WAITED,
    Metadata,
    SpoolError,
    columns,
    pack_header,
    part_name,
    rank_folder,
    read_spool,
    spool_bytes,
)
from ddpan.collector.segments import COLLECTIVE, STEP

Row = dict[str, Any]
EPOCH_OFFSET_NS = 1_700_000_000_000_000_000
RECORDS = {"steps": STEP_RECORD, "collectives": COLLECTIVE_RECORD}
POLARS = {
    "u16": pl.UInt16,
    "u32": pl.UInt32,
    "u64": pl.UInt64,
    "i64": pl.Int64,
    "bool": pl.Boolean,
}

u16 = st.integers(0, NONE16 - 1)
u32 = st.integers(0, NONE32 - 1)
u64 = st.integers(0, 2**64 - 1)
monotonic = st.integers(1, 2**62)


def nullable(values: st.SearchStrategy[int]) -> st.SearchStrategy[int | None]:
    return st.none() | values


steps = st.fixed_dictionaries(
    {
        "module": u16,
        "step": u32,
        "micro_batch": u16,
        "synced": st.booleans(),
        "data_wait_ns": st.integers(0, 2**62),
        "forward_start_ns": monotonic,
        "forward_end_ns": nullable(monotonic),
        "compute_end_ns": nullable(monotonic),
        "backward_end_ns": nullable(monotonic),
        "optimizer_start_ns": nullable(monotonic),
        "optimizer_end_ns": nullable(monotonic),
    }
)
collectives = st.fixed_dictionaries(
    {
        "group": u16,
        "seq": u64,
        "op": st.sampled_from(OPS),
        "module": nullable(u16),
        "step": nullable(u32),
        "bucket": nullable(u16),
        "layout": nullable(u16),
        "bytes": u64,
        "ready_ns": nullable(monotonic),
        "launch_ns": monotonic,
        "start_ns": nullable(monotonic),
        "end_ns": nullable(monotonic),
        "wait_start_ns": nullable(monotonic),
    }
).map(lambda row: row if row["wait_start_ns"] is None else {**row, "ready_ns": None})
ABSENT = {"module": NONE16, "bucket": NONE16, "layout": NONE16, "step": NONE32}
TIMES = {
    "steps": [name for name in STEP_RECORD.names or () if name.endswith("_ns") and name != "data_wait_ns"],
    "collectives": ["ready_ns", "launch_ns", "start_ns", "end_ns", "wait_start_ns"],
}


def records_of(table: str, rows: list[Row]) -> npt.NDArray[np.void]:
    """The rows as the recorder would have packed them."""
    records = np.zeros(len(rows), RECORDS[table])
    for record, row in zip(records, rows, strict=True):
        for name, value in row.items():
            if name == "wait_start_ns":
                if value is not None:
                    record["ready_ns"], record["flags"] = value, WAITED
                continue
            if name == "ready_ns" and row.get("wait_start_ns") is not None:
                continue
            record[name] = OPS.index(value) if name == "op" else ABSENT.get(name, 0) if value is None else value
        record["commit"] = 1
    return records


def expected(table: str, rows: list[Row], rank: int) -> list[Row]:
    """The rows as a reader must see them."""
    seen = []
    for row in rows:
        times = {t: None if row[t] is None else row[t] + EPOCH_OFFSET_NS for t in TIMES[table]}
        merged = {"rank": rank, **row, **times}
        seen.append({column.name: merged[column.name] for column in TABLES[table]})
    return seen


def spool_file(folder: Path, step_rows: list[Row], collective_rows: list[Row], *, spare: int = 2) -> Path:
    capacity = (len(step_rows) + spare, len(collective_rows) + spare)
    header = pack_header(
        segment=7,
        epoch_offset_ns=EPOCH_OFFSET_NS,
        rank=3,
        world_size=8,
        steps_capacity=capacity[0],
        collectives_capacity=capacity[1],
        run="20261130T205019-3f9a1c2e",
        host="node-a",
    )
    content = header.ljust(HEADER_BYTES, b"\0")
    content += records_of("steps", step_rows).tobytes() + bytes(spare * STEP_RECORD.itemsize)
    content += records_of("collectives", collective_rows).tobytes() + bytes(spare * COLLECTIVE_RECORD.itemsize)
    assert len(content) == spool_bytes(*capacity)
    path = folder / "live-000007.spool"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("table", TABLES)
def test_packed_form_is_the_numpy_form(table: str) -> None:
    """The recorder packs with `struct`, the readers see numpy records: they must agree on every offset."""
    packer, dtype = {"steps": (STEP, STEP_RECORD), "collectives": (COLLECTIVE, COLLECTIVE_RECORD)}[table]
    assert packer.size == dtype.itemsize
    names = dtype.names or ()
    values = list(range(1, len(names) + 1))
    [record] = np.frombuffer(packer.pack(*values), dtype)
    assert record.tolist() == tuple(values)
    assert names[-1] == "commit"
    assert dtype.fields is not None
    assert dtype.fields["commit"][1] == dtype.itemsize - 1, "a record cut anywhere must not count"


@given(st.lists(steps, max_size=20), st.lists(collectives, max_size=20))
def test_spool_round_trip(step_rows: list[Row], collective_rows: list[Row]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spool = read_spool(spool_file(Path(folder), step_rows, collective_rows))
    assert (spool.segment, spool.rank, spool.world_size, spool.truncated) == (7, 3, 8, False)
    assert (spool.run, spool.host) == ("20261130T205019-3f9a1c2e", "node-a")
    for table, rows in (("steps", step_rows), ("collectives", collective_rows)):
        got = pl.DataFrame(
            {
                name: pl.Series(name, values).set(pl.Series(missing), None) if missing is not None else values
                for name, (values, missing) in spool.columns(table).items()
            }
        )
        wanted = [row | {"op": OPS.index(row["op"])} if "op" in row else row for row in expected(table, rows, 3)]
        assert got.to_dicts() == wanted


@pytest.mark.parametrize(("table", "strategy"), [("steps", steps), ("collectives", collectives)])
def test_part_round_trip(
    table: str, strategy: st.SearchStrategy[Row], metadata: Callable[[str | None, int | None, bool], Metadata]
) -> None:
    @given(st.lists(strategy, max_size=20))
    def check(rows: list[Row]) -> None:
        described = metadata(table, 7, False)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / part_name(table, 7)
            write_part(path, table, records_of(table, rows), described, epoch_offset_ns=EPOCH_OFFSET_NS)
            frame = pl.read_parquet(path)
            assert json.loads(pl.read_parquet_metadata(path)[METADATA_KEY]) == described
        assert frame.to_dicts() == expected(table, rows, described["rank"])
        assert frame.columns == [column.name for column in TABLES[table]]
        for column in TABLES[table]:
            if column.dtype == "enum":
                assert frame[column.name].dtype in (pl.Categorical, pl.String)
            else:
                assert frame[column.name].dtype == POLARS[column.dtype]
            if not column.nullable:
                assert frame[column.name].null_count() == 0

    check()


@pytest.mark.parametrize("table", TABLES)
def test_what_is_not_nullable_is_never_null(table: str) -> None:
    """A record of zeros and of all ones: the extremes of every field."""
    for byte in (0x00, 0xFF):
        records = np.frombuffer(bytes([byte]) * RECORDS[table].itemsize, RECORDS[table])
        for column, (values, missing) in zip(
            TABLES[table], columns(table, records, rank=3, epoch_offset_ns=0).values(), strict=True
        ):
            assert len(values) == 1
            assert (missing is None) == (not column.nullable)


def test_op_of_a_newer_version_is_unknown() -> None:
    record = np.zeros(1, COLLECTIVE_RECORD)
    record["op"] = len(OPS)
    values, _ = columns("collectives", record, rank=0, epoch_offset_ns=0)["op"]
    assert values.tolist() == [OPS.index("unknown")]


@given(st.data())
def test_truncated_spool_gives_what_is_there(data: st.DataObject) -> None:
    rows = [{name: 1 for name in STEP_RECORD.names or () if name != "commit"} | {"step": i} for i in range(4)]
    plain: Row = {name: 1 for name in COLLECTIVE_RECORD.names or () if name not in ("commit", "op")}
    others = [plain | {"op": "barrier", "seq": i} for i in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        path = spool_file(Path(folder), rows, others, spare=0)
        content = path.read_bytes()
        length = data.draw(st.integers(0, len(content) - 1))
        path.write_bytes(content[:length])
        if length < HEADER_BYTES:
            with pytest.raises(SpoolError, match="truncated"):
                read_spool(path)
            return
        spool = read_spool(path)
    assert spool.truncated
    whole_steps = min(4, (length - HEADER_BYTES) // STEP_RECORD.itemsize)
    begin = HEADER_BYTES + 4 * STEP_RECORD.itemsize
    whole_collectives = max(0, length - begin) // COLLECTIVE_RECORD.itemsize
    assert spool.steps["step"].tolist() == list(range(whole_steps))
    assert spool.collectives["seq"].tolist() == list(range(whole_collectives))


def test_record_without_its_commit_mark_does_not_count(tmp_path: Path) -> None:
    rows = [{"seq": i, "op": "all_reduce", "launch_ns": 5} for i in range(5)]
    path = spool_file(tmp_path, [], rows)
    content = bytearray(path.read_bytes())
    begin = HEADER_BYTES + 2 * STEP_RECORD.itemsize
    content[begin + 3 * COLLECTIVE_RECORD.itemsize - 1] = 0
    path.write_bytes(content)
    assert read_spool(path).collectives["seq"].tolist() == [0, 1, 3, 4]


def test_counters_of_the_header(tmp_path: Path) -> None:
    path = spool_file(tmp_path, [], [])
    content = bytearray(path.read_bytes())
    content[COUNTERS_OFFSET : COUNTERS_OFFSET + 8 * len(COUNTERS)] = np.arange(11, 11 + len(COUNTERS)).tobytes()
    path.write_bytes(content)
    assert read_spool(path).counters == {name: 11 + i for i, name in enumerate(COUNTERS)}


def rewritten(path: Path, offset: int, value: bytes) -> Path:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(value)] = value
    path.write_bytes(content)
    return path


def test_not_a_spool(tmp_path: Path) -> None:
    path = rewritten(spool_file(tmp_path, [], []), 0, b"NOTDDPAN")
    with pytest.raises(SpoolError, match="is not a ddpan spool"):
        read_spool(path)


def test_newer_spool(tmp_path: Path) -> None:
    path = rewritten(spool_file(tmp_path, [], []), 8, (2).to_bytes(4, "little"))
    with pytest.raises(SpoolError, match=r"version 2.*upgrade"):
        read_spool(path)


def test_damaged_header(tmp_path: Path) -> None:
    # The sizes of both records follow the two capacities, which follow rank and world size.
    path = rewritten(spool_file(tmp_path, [], []), 56, (1000).to_bytes(4, "little"))
    with pytest.raises(SpoolError, match="damaged header"):
        read_spool(path)


def test_long_host_name_fits(tmp_path: Path) -> None:
    header = pack_header(
        segment=0,
        epoch_offset_ns=0,
        rank=0,
        world_size=1,
        steps_capacity=0,
        collectives_capacity=0,
        run="r",
        host="ä" * 300,
    )
    assert len(header) == COUNTERS_OFFSET
    path = tmp_path / "live-000000.spool"
    path.write_bytes(header.ljust(HEADER_BYTES, b"\0"))
    assert read_spool(path).host == "ä" * 128


def test_file_names() -> None:
    assert rank_folder(3) == "rank-00003"
    assert part_name("steps", 12) == "steps-000012.parquet"
