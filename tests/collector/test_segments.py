"""The spool: every record lands in its own place, nothing is lost in silence, and a killed process keeps its log."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddpan.collector.collectives import OP_CODES, Collectives
from ddpan.collector.schema import COLLECTIVE_RECORD, HEADER_BYTES, STEP_RECORD, read_spool, spool_bytes
from ddpan.collector.segments import STEP, Spool, segment_name

MakeSpool = Callable[..., Spool]


def launch(spool: Spool, count: int) -> list[int]:
    """Record ``count`` collectives, each ended at once; the positions of those that were kept."""
    collectives = Collectives(spool)
    collectives.add_group(0)
    kept = []
    for seq in range(count):
        slot = collectives.launch(0, OP_CODES["all_reduce"], 100 + seq, 1000 + seq)
        if slot is not None:
            collectives.end(slot, 2000 + seq)
            kept.append(seq)
    return kept


def test_reservations_do_not_overlap(make_spool: MakeSpool) -> None:
    spool = make_spool(steps=3, collectives=5)
    step_slots = [spool.reserve_step() for _ in range(3)]
    collective_slots = [spool.reserve_collective() for _ in range(5)]
    offsets = [slot[1] for slot in step_slots if slot] + [slot[1] for slot in collective_slots if slot]
    steps_end = HEADER_BYTES + 3 * STEP_RECORD.itemsize
    assert offsets == [HEADER_BYTES + i * STEP_RECORD.itemsize for i in range(3)] + [
        steps_end + i * COLLECTIVE_RECORD.itemsize for i in range(5)
    ]
    assert len(spool.current.map) == spool_bytes(3, 5) == steps_end + 5 * COLLECTIVE_RECORD.itemsize


def test_records_are_in_the_file_at_once(make_spool: MakeSpool, tmp_path: Path) -> None:
    spool = make_spool()
    launch(spool, 3)
    segment, offset = spool.reserve_step() or (spool.current, -1)
    STEP.pack_into(segment.map, offset, 7, 11, 12, 0, 0, 0, 0, 5, 0, 0, 0, 0, 1, 1)
    segment.keep(offset, STEP.size)
    seen = read_spool(tmp_path / segment_name(0))
    assert seen.collectives["seq"].tolist() == [0, 1, 2]
    assert seen.collectives["bytes"].tolist() == [100, 101, 102]
    assert seen.collectives["end_ns"].tolist() == [2000, 2001, 2002]
    assert seen.steps["step"].tolist() == [5]
    assert (seen.run, seen.host, seen.rank, seen.world_size) == ("20261130T205019-3f9a1c2e", "node-a", 3, 8)


def test_turning_over_to_the_spare(make_spool: MakeSpool, tmp_path: Path) -> None:
    woken = []
    spool = make_spool(collectives=4, wake=lambda: woken.append(True))
    spool.prepare_spare()
    assert launch(spool, 6) == [0, 1, 2, 3, 4, 5]
    assert woken == [True]
    assert [segment.number for segment in spool.full] == [0]
    assert read_spool(tmp_path / segment_name(0)).collectives["seq"].tolist() == [0, 1, 2, 3]
    assert read_spool(tmp_path / segment_name(1)).collectives["seq"].tolist() == [4, 5]


def test_full_steps_turn_over_too(make_spool: MakeSpool) -> None:
    spool = make_spool(steps=2)
    spool.prepare_spare()
    slots = [spool.reserve_step() for _ in range(4)]
    assert [slot and slot[0].number for slot in slots] == [0, 0, 1, 1]


def test_without_a_spare_events_are_dropped_and_counted(make_spool: MakeSpool, tmp_path: Path) -> None:
    spool = make_spool(collectives=4)
    assert launch(spool, 7) == [0, 1, 2, 3]
    assert spool.counts["dropped_no_segment"] == 3
    seen = read_spool(tmp_path / segment_name(0))
    assert seen.counters["dropped_no_segment"] == 3
    assert len(seen.collectives) == 4


def test_recording_resumes_when_there_is_a_spare_again(make_spool: MakeSpool, tmp_path: Path) -> None:
    spool = make_spool(collectives=4)
    collectives = Collectives(spool)
    collectives.add_group(0)
    for event in range(8):
        if event == 6:
            spool.prepare_spare()
        collectives.launch(0, OP_CODES["all_reduce"], 0, 1)
    # Positions are counted even where the record was dropped: ranks still join.
    assert read_spool(tmp_path / segment_name(1)).collectives["seq"].tolist() == [6, 7]
    assert read_spool(tmp_path / segment_name(1)).counters["dropped_no_segment"] == 2


def test_counters_are_cumulative_over_segments(make_spool: MakeSpool, tmp_path: Path) -> None:
    spool = make_spool(collectives=1)
    for segment in range(3):
        spool.count("errors")
        spool.prepare_spare()
        launch(spool, 2 if segment == 0 else 1)
    for segment in range(3):
        assert read_spool(tmp_path / segment_name(segment)).counters["errors"] == min(segment + 1, 3)


def test_closed_spool_takes_nothing_more(make_spool: MakeSpool, tmp_path: Path) -> None:
    spool = make_spool(collectives=4)
    spool.prepare_spare()
    launch(spool, 4)
    spool.close()
    assert launch(spool, 2) == []
    assert spool.counts["dropped_no_segment"] == 2
    assert [segment.number for segment in spool.full] == [0]
    assert not (tmp_path / segment_name(1)).exists(), "the spare was not used and must not stay behind"


def test_spool_that_cannot_be_made(make_spool: MakeSpool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(_descriptor: int, _offset: int, _length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        make_spool()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("fresh_messages")
def test_full_disk_pauses_the_recording(
    make_spool: MakeSpool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spool = make_spool(collectives=2)
    with monkeypatch.context() as broken:

        def full(_descriptor: int, _offset: int, _length: int) -> None:
            raise OSError(28, "No space left on device")

        broken.setattr(os, "posix_fallocate", full)
        for _ in range(3):
            spool.prepare_spare()
        assert launch(spool, 5) == [0, 1]
    assert spool.counts["dropped_no_segment"] + spool.counts["dropped_disk_full"] == 3
    [line] = capsys.readouterr().err.splitlines()
    assert str(tmp_path) in line
    assert "the disk is full" in line
    spool.prepare_spare()
    assert launch(spool, 1) == [0]
    assert sorted(p.name for p in tmp_path.iterdir()) == [segment_name(0), segment_name(1)]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(events=st.lists(st.sampled_from(["step", "collective", "spare"]), max_size=60), capacity=st.integers(1, 5))
def test_every_event_is_kept_or_counted(make_spool: MakeSpool, events: list[str], capacity: int) -> None:
    spool = make_spool(steps=capacity, collectives=capacity + 1)
    places = []
    attempts = 0
    for event in events:
        if event == "spare":
            spool.prepare_spare()
        else:
            attempts += 1
            places.append(spool.reserve_step() if event == "step" else spool.reserve_collective())
    kept = [(slot[0].number, slot[1]) for slot in places if slot is not None]
    assert len(set(kept)) == len(kept)
    assert len(kept) + spool.counts["dropped_no_segment"] == attempts


def test_threads_share_a_spool(make_spool: MakeSpool, tmp_path: Path) -> None:
    spool = make_spool(collectives=50)
    collectives = Collectives(spool)
    collectives.add_group(0)
    done = threading.Event()
    kept: list[int] = []

    def record() -> None:
        slots = [collectives.launch(0, OP_CODES["all_reduce"], 0, 1) for _ in range(2000)]
        kept.append(sum(slot is not None for slot in slots))

    def supply() -> None:
        while not done.is_set():
            spool.prepare_spare()

    background = threading.Thread(target=supply)
    threads = [threading.Thread(target=record) for _ in range(4)]
    background.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    background.join()
    seqs = [seq for path in tmp_path.glob("live-*.spool") for seq in read_spool(path).collectives["seq"].tolist()]
    assert len(seqs) == len(set(seqs)) == sum(kept)
    assert sum(kept) + spool.counts["dropped_no_segment"] == 8000
    assert max(seqs) < 8000


DAMAGE: dict[str, Callable[[Path], object]] = {
    "emptied": lambda path: os.truncate(path, 0),
    "cut": lambda path: os.truncate(path, HEADER_BYTES + 10),
    "removed": Path.unlink,
    "replaced": lambda path: shutil.copy(__file__, path.with_name("other")) and path.with_name("other").replace(path),
    "folder removed": lambda path: shutil.rmtree(path.parent),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_spool_damaged_by_somebody_else(damage: str, tmp_path: Path) -> None:
    """A store beyond the end of a mapped file is SIGBUS, so this is another process: it must live, and lose nothing."""
    folder = tmp_path / "run" / "rank-00000"
    folder.mkdir(parents=True)
    program = f"""
import pathlib, sys
from ddpan.collector.collectives import Collectives
from ddpan.collector.segments import Spool
spool = Spool(pathlib.Path({str(folder)!r}), epoch_offset_ns=0,
              identity=dict(rank=0, world_size=1, run="r", host="h"), steps=4, collectives=4000,
              clock=lambda: 0, wake=lambda: None)
collectives = Collectives(spool)
collectives.add_group(0)
for event in range(3000):
    if event in (1000, 2000):
        print("ready", flush=True)
        sys.stdin.readline()
    if event == 2000:
        assert spool.mend()
        assert not spool.mend()
    collectives.end(collectives.launch(0, 1, event, 1 + event), 2 + event)
"""
    writer = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert writer.stdin is not None
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    DAMAGE[damage](folder / segment_name(0))
    writer.stdin.write("go on\n")
    writer.stdin.flush()
    assert writer.stdout.readline() == "ready\n"
    _, said = writer.communicate("go on\n", timeout=60)
    assert writer.returncode == 0, said
    [line] = said.splitlines()
    assert "damaged or removed" in line
    assert "training goes on" in line
    seen = read_spool(folder / segment_name(0))
    assert seen.collectives["seq"].tolist() == list(range(3000))
    assert seen.collectives["end_ns"].tolist() == list(range(2, 3002))
    assert seen.counters["spool_repairs"] == 1


@pytest.mark.usefixtures("fresh_messages")
def test_folder_of_the_user_is_not_made_again(make_spool: MakeSpool, tmp_path: Path) -> None:
    """Who removes the whole log wants no new one; who makes the folder again does."""
    logs = tmp_path / "logs"
    folder = logs / "run" / "rank-00003"
    folder.mkdir(parents=True)
    spool = make_spool(folder=folder)
    shutil.rmtree(logs)
    launch(spool, 3)
    with pytest.raises(FileNotFoundError):
        spool.mend()
    assert not logs.exists()
    logs.mkdir()
    assert spool.mend()
    assert read_spool(folder / segment_name(0)).collectives["seq"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("moment", ["os.posix_fallocate", "fcntl.fcntl", "mmap.mmap", "pathlib.Path.rename"])
def test_killed_while_a_segment_is_made(
    moment: str, tmp_path: Path, read_rank: Callable[[Path], dict[str, list[dict[str, Any]]]]
) -> None:
    """The half-made spare must not look like a damaged log."""
    program = f"""
import fcntl, mmap, os, pathlib
from ddpan.collector.segments import Spool
spool = Spool(pathlib.Path({str(tmp_path)!r}), epoch_offset_ns=0,
              identity=dict(rank=0, world_size=1, run="r", host="h"), steps=4, collectives=4,
              clock=lambda: 0, wake=lambda: None)
{moment} = lambda *_: os._exit(9)
spool.prepare_spare()
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9
    assert read_rank(tmp_path) == {"steps": [], "collectives": []}


def test_record_written_after_its_segment_became_a_part_is_counted(
    make_spool: MakeSpool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread may lose the interpreter lock between reserving and writing, however rarely, and for long."""
    spool = make_spool(collectives=4)
    collectives = Collectives(spool)
    collectives.add_group(0)
    reserve = spool.reserve_collective

    def overtaken() -> Any:
        slot = reserve()
        assert slot is not None
        slot[0].converted = True
        return slot

    monkeypatch.setattr(spool, "reserve_collective", overtaken)
    collectives.launch(0, OP_CODES["all_reduce"], 0, 1)
    assert sum(spool.counts.values()) == 1
