"""What the tests of the collector share: a clock under control, a spool, the reader of a rank's folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from ddpan.collector import messages
from ddpan.collector.schema import METADATA_KEY, TABLES, Counters, Job, Metadata, part_name, read_spool
from ddpan.collector.schema import Clock as ClockMetadata
from ddpan.collector.segments import Spool

EPOCH_OFFSET_NS = 1_700_000_000_000_000_000


class FakeClock:
    """A monotonic clock that moves when told to."""

    def __init__(self) -> None:
        self.time_ns = 1_000_000

    def __call__(self) -> int:
        return self.time_ns

    def advance(self, seconds: float) -> None:
        self.time_ns += round(seconds * 1e9)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def make_spool(tmp_path: Path, clock: FakeClock) -> Callable[..., Spool]:
    """Builds a spool of small segments, in ``tmp_path`` unless told otherwise."""

    def make(
        *,
        steps: int = 2,
        collectives: int = 4,
        wake: Callable[[], None] = lambda: None,
        folder: Path = tmp_path,
    ) -> Spool:
        return Spool(
            folder,
            epoch_offset_ns=EPOCH_OFFSET_NS,
            identity={"rank": 3, "world_size": 8, "run": "20261130T205019-3f9a1c2e", "host": "node-a"},
            steps=steps,
            collectives=collectives,
            clock=clock,
            wake=wake,
        )

    return make


@pytest.fixture
def metadata() -> Callable[[str | None, int | None, bool], Metadata]:
    """The metadata of a rank that saw little."""

    def build(table: str | None, part: int | None, closed: bool) -> Metadata:
        return Metadata(
            schema_version=1,
            table=table,
            part=part,
            run="20261130T205019-3f9a1c2e",
            rank=3,
            local_rank=1,
            world_size=8,
            host="node-a",
            pid=17,
            device="cpu",
            backend="gloo",
            tap="reducer_group",
            versions={"torch": "2.13.0"},
            job=Job(id=None, restart=0),
            clock=ClockMetadata(anchor_monotonic_ns=0, anchor_epoch_ns=EPOCH_OFFSET_NS, uncertainty_ns=10),
            groups={},
            modules={},
            layouts={},
            counters=Counters(dropped={}, errors=0, late_ends=0, removed_parts=0, spool_repairs=0),
            settings={},
            closed=closed,
        )

    return build


@pytest.fixture
def fresh_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings said by earlier tests are forgotten."""
    monkeypatch.setattr(messages, "_said", set())


@pytest.fixture
def read_rank() -> Callable[[Path], dict[str, list[dict[str, Any]]]]:
    """Reads all rows of a rank's folder by the rule of the format: a part, else the spool of the same number."""

    def rows_of_spool(path: Path, table: str) -> list[dict[str, Any]]:
        columns = read_spool(path).columns(table)
        data = {
            name: [None if missing is not None and missing[i] else v for i, v in enumerate(values.tolist())]
            for name, (values, missing) in columns.items()
        }
        return [dict(zip(data, row, strict=True)) for row in zip(*data.values(), strict=True)]

    def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
        spools = {int(p.stem.split("-")[1]): p for p in folder.glob("live-*.spool")}
        parts = {int(p.stem.split("-")[1]) for p in folder.glob("*-??????.parquet")}
        result: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES}
        for number in sorted(parts | set(spools)):
            for table in TABLES:
                part = folder / part_name(table, number)
                if part.exists():
                    result[table] += pl.read_parquet(part).to_dicts()
                elif number in spools:
                    result[table] += rows_of_spool(spools[number], table)
        return result

    return read


@pytest.fixture
def part_metadata() -> Callable[[Path], Metadata]:
    """The metadata in a part."""

    def read(path: Path) -> Metadata:
        loaded: Metadata = json.loads(pl.read_parquet_metadata(path)[METADATA_KEY])
        return loaded

    return read
