"""Segments become Parquet parts: whole or not at all, once, and the thread that does it survives everything."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from ddpan.collector import parts
from ddpan.collector.collectives import OP_CODES, Collectives
from ddpan.collector.parts import LATE_END_GRACE_NS, PartWriter, committed_records, write_part
from ddpan.collector.schema import LIVE_METADATA, PART_PATTERN, STEP_RECORD, Metadata, part_name
from ddpan.collector.segments import STEP, Segment, Slot, Spool, segment_name

Metadatas = Callable[[str | None, int | None, bool], Metadata]
ReadRank = Callable[[Path], dict[str, list[dict[str, Any]]]]
PartMetadata = Callable[[Path], Metadata]

pytestmark = pytest.mark.usefixtures("fresh_messages")


class Recorder:
    """A spool of small segments with its part writer, and a hand to record with."""

    def __init__(self, spool: Spool, metadata: Metadatas, clock: Callable[[], int], wake: threading.Event) -> None:
        self.spool = spool
        self.open_rows: list[Segment] = []
        self.collectives = Collectives(spool)
        self.collectives.add_group(0)
        self.writer = PartWriter(
            spool,
            metadata=metadata,
            closed_rows=lambda segment: segment not in self.open_rows,
            keep=lambda: None,
            retention=None,
            clock=clock,
            wake=wake,
        )

    def launch(self, count: int = 1, *, end: bool = True) -> list[Slot]:
        slots = []
        for _ in range(count):
            slot = self.collectives.launch(0, OP_CODES["broadcast"], 8, 1000)
            assert slot is not None
            slots.append(slot)
            if end:
                self.collectives.end(slot, 2000)
        return slots

    def step(self, number: int) -> None:
        slot = self.spool.reserve_step()
        assert slot is not None
        STEP.pack_into(slot[0].map, slot[1], 0, 10 + number, 20, 0, 0, 0, 0, number, 0, 0, 0, 0, 1, 1)
        slot[0].keep(slot[1], STEP.size)


@pytest.fixture
def recorder(make_spool: Callable[..., Spool], metadata: Metadatas, clock: Callable[[], int]) -> Iterator[Recorder]:
    wake = threading.Event()
    made = Recorder(make_spool(steps=4, collectives=4, wake=wake.set), metadata, clock, wake)
    yield made
    if made.writer._thread.is_alive():
        made.writer.stop()


def eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def parts_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob(PART_PATTERN))


def test_part_appears_whole_under_its_name(
    tmp_path: Path, metadata: Metadatas, monkeypatch: pytest.MonkeyPatch, recorder: Recorder
) -> None:
    happened: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        happened.append("fsync")
        fsync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        happened.append("rename")
        assert not target.exists()
        assert pl.read_parquet(self.read_bytes()).height == 3, "what is renamed is already whole"
        assert self not in tmp_path.glob(PART_PATTERN), "a reader must not take the temporary file for a part"
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    recorder.launch(3)
    path = tmp_path / part_name("collectives", 0)
    records = committed_records(recorder.spool.current, "collectives")
    write_part(path, "collectives", records, metadata("collectives", 0, True), epoch_offset_ns=5)
    assert happened == ["fsync", "rename"]
    frame = pl.read_parquet(path)
    assert frame["seq"].to_list() == [0, 1, 2]
    assert frame["launch_ns"].to_list() == [1005, 1005, 1005]
    assert frame["op"].to_list() == ["broadcast"] * 3
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".tmp"] == []


def test_part_that_fails_leaves_no_part(
    tmp_path: Path, metadata: Metadatas, monkeypatch: pytest.MonkeyPatch, recorder: Recorder
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    records = committed_records(recorder.spool.current, "steps")
    with pytest.raises(OSError, match="No space left"):
        write_part(tmp_path / part_name("steps", 0), "steps", records, metadata("steps", 0, False), epoch_offset_ns=0)
    assert parts_in(tmp_path) == []


def test_full_segment_becomes_two_parts_and_goes(
    recorder: Recorder, tmp_path: Path, read_rank: ReadRank, part_metadata: PartMetadata
) -> None:
    recorder.writer.start()
    eventually(lambda: recorder.spool.spare is not None)
    recorder.step(0)
    recorder.launch(5)
    eventually(lambda: not (tmp_path / segment_name(0)).exists())
    assert parts_in(tmp_path) == ["collectives-000000.parquet", "steps-000000.parquet"]
    assert [r["seq"] for r in read_rank(tmp_path)["collectives"]] == [0, 1, 2, 3, 4]
    assert [r["step"] for r in read_rank(tmp_path)["steps"]] == [0]
    for table in ("steps", "collectives"):
        described = part_metadata(tmp_path / part_name(table, 0))
        assert (described["table"], described["part"], described["closed"]) == (table, 0, False)


def test_stop_writes_what_is_left(
    recorder: Recorder, tmp_path: Path, read_rank: ReadRank, part_metadata: PartMetadata
) -> None:
    recorder.writer.start()
    eventually(lambda: recorder.spool.spare is not None)
    recorder.launch(6)
    recorder.step(7)
    recorder.writer.stop()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        f"{table}-{number:06d}.parquet" for table in ("collectives", "steps") for number in (0, 1)
    ]
    rows = read_rank(tmp_path)
    assert [r["seq"] for r in rows["collectives"]] == [0, 1, 2, 3, 4, 5]
    assert [r["step"] for r in rows["steps"]] == [7]
    closed = {number: part_metadata(tmp_path / part_name("steps", number))["closed"] for number in (0, 1)}
    assert closed == {0: False, 1: True}


def test_recording_without_events(recorder: Recorder, tmp_path: Path, part_metadata: PartMetadata) -> None:
    recorder.writer.start()
    recorder.writer.stop()
    assert parts_in(tmp_path) == ["collectives-000000.parquet", "steps-000000.parquet"]
    assert pl.read_parquet(tmp_path / "steps-000000.parquet").height == 0
    assert part_metadata(tmp_path / "steps-000000.parquet")["closed"]


def test_live_metadata(recorder: Recorder, tmp_path: Path, metadata: Metadatas) -> None:
    recorder.writer.start()
    live = tmp_path / LIVE_METADATA
    eventually(live.exists)
    assert json.loads(live.read_text()) == metadata(None, None, False)
    recorder.writer.stop()
    assert not live.exists(), "the parts tell all of it now"


def test_live_metadata_is_written_anew(recorder: Recorder, tmp_path: Path) -> None:
    recorder.writer.start()
    live = tmp_path / LIVE_METADATA
    eventually(live.exists)
    before = live.stat().st_mtime_ns
    recorder.writer.metadata_changed = True
    eventually(lambda: live.stat().st_mtime_ns > before)


def test_segment_waits_for_its_last_end(recorder: Recorder, tmp_path: Path, read_rank: ReadRank) -> None:
    recorder.spool.prepare_spare()
    [slot] = recorder.launch(end=False)
    recorder.launch(4)
    assert [s.number for s in recorder.spool.full] == [0]
    recorder.writer.start()
    eventually((tmp_path / LIVE_METADATA).exists)
    assert parts_in(tmp_path) == []
    recorder.collectives.end(slot, 3000)
    eventually(lambda: len(parts_in(tmp_path)) == 2)
    ends = [row["end_ns"] for row in read_rank(tmp_path)["collectives"]]
    assert ends == [1_700_000_000_000_000_000 + end for end in (3000, 2000, 2000, 2000, 2000)]


def test_end_that_never_comes(recorder: Recorder, tmp_path: Path, clock: Any, read_rank: ReadRank) -> None:
    recorder.spool.prepare_spare()
    [slot] = recorder.launch(end=False)
    recorder.launch(4)
    clock.advance(LATE_END_GRACE_NS / 1e9 + 1)
    recorder.writer.start()
    eventually(lambda: not (tmp_path / segment_name(0)).exists())
    recorder.collectives.end(slot, 9000)
    assert recorder.spool.counts["late_ends"] == 1
    rows = read_rank(tmp_path)["collectives"]
    assert [row["end_ns"] is None for row in rows] == [True, False, False, False, False]


def test_segment_waits_for_an_open_step(recorder: Recorder, tmp_path: Path) -> None:
    recorder.spool.prepare_spare()
    recorder.open_rows.append(recorder.spool.current)
    recorder.launch(5)
    recorder.writer.start()
    eventually((tmp_path / LIVE_METADATA).exists)
    assert parts_in(tmp_path) == []
    recorder.open_rows.clear()
    eventually(lambda: len(parts_in(tmp_path)) == 2)


def test_disk_that_is_full_for_a_while(
    recorder: Recorder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    read_rank: ReadRank,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The events stay in the spool, where a reader finds them, and become parts when there is room."""
    tries = []

    def full(*_args: Any, **_kwargs: Any) -> None:
        tries.append(True)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(parts, "write_part", full)
        recorder.writer.start()
        eventually(lambda: recorder.spool.spare is not None)
        recorder.launch(5)
        eventually(lambda: len(tries) >= 2)
        assert parts_in(tmp_path) == []
        assert [r["seq"] for r in read_rank(tmp_path)["collectives"]] == [0, 1, 2, 3, 4]
    eventually(lambda: len(parts_in(tmp_path)) == 2)
    assert [r["seq"] for r in read_rank(tmp_path)["collectives"]] == [0, 1, 2, 3, 4]
    [line] = capsys.readouterr().err.splitlines()
    assert "the disk is full" in line
    assert str(tmp_path) in line
    assert "training goes on" in line


@pytest.mark.parametrize("written", [0, 1, 2])
def test_killed_while_converting(
    written: int, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_rank: ReadRank
) -> None:
    """The process ends after 0, 1 or both parts of a segment, before the segment is removed."""

    def killed(*_args: Any, **_kwargs: Any) -> None:
        raise KeyboardInterrupt

    recorder.step(0)
    recorder.launch(3)
    recorder.spool.close()
    tables: list[str] = []

    def write(path: Path, table: str, *args: Any, **kwargs: Any) -> None:
        if len(tables) == written:
            raise KeyboardInterrupt
        tables.append(table)
        write_part(path, table, *args, **kwargs)

    monkeypatch.setattr(parts, "write_part", write)
    monkeypatch.setattr(Path, "unlink", killed)
    with pytest.raises(KeyboardInterrupt):
        recorder.writer._convert(recorder.spool.full[0], last=True)
    assert len(parts_in(tmp_path)) == written
    rows = read_rank(tmp_path)
    assert [r["seq"] for r in rows["collectives"]] == [0, 1, 2]
    assert [r["step"] for r in rows["steps"]] == [0]


def test_without_pyarrow_the_log_stays_in_the_spool(
    recorder: Recorder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    read_rank: ReadRank,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    recorder.writer.start()
    eventually(lambda: recorder.spool.spare is not None)
    recorder.launch(6)
    recorder.writer.stop()
    assert parts_in(tmp_path) == []
    assert [r["seq"] for r in read_rank(tmp_path)["collectives"]] == [0, 1, 2, 3, 4, 5]
    assert (tmp_path / LIVE_METADATA).exists(), "without parts the metadata is needed"
    [line] = capsys.readouterr().err.splitlines()
    assert "pyarrow" in line


def test_thread_survives_a_mistake(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bug in making the metadata costs the parts made meanwhile, not the thread."""
    good = recorder.writer._metadata

    def bad(*_args: object) -> Metadata:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(recorder.writer, "_metadata", bad)
    recorder.writer.start()
    eventually(lambda: recorder.spool.counts["errors"] > 0)
    monkeypatch.setattr(recorder.writer, "_metadata", good)
    eventually(lambda: recorder.spool.spare is not None)
    recorder.launch(5)
    eventually(lambda: len(parts_in(tmp_path)) == 2)
    [line] = capsys.readouterr().err.splitlines()
    assert "a bug" in line


def test_live_metadata_that_failed_is_tried_again(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def full(*_args: Any, **_kwargs: Any) -> None:
        tries.append(True)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "write_text", full)
        recorder.writer.start()
        eventually(lambda: len(tries) > 0)
    eventually((tmp_path / LIVE_METADATA).exists)


def test_record_size_is_what_the_spool_reserves(recorder: Recorder) -> None:
    recorder.step(5)
    recorder.step(6)
    records = committed_records(recorder.spool.current, "steps")
    assert records.dtype == STEP_RECORD
    assert records["step"].tolist() == [5, 6]
