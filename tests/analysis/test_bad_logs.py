"""Logs that are damaged in every way that has been seen: one clear line, or a reported gap."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from ddpan.analysis.errors import DamagedLogError, NoLogError, UsageError
from ddpan.analysis.run import find_runs, load
from ddpan.analysis.testing import Scenario, SyntheticRun, simulate, write_log
from ddpan.collector.schema import METADATA_KEY, SCHEMA_VERSION

SMALL = Scenario(ranks=3, steps=12, buckets=4)


def kinds(run: Any) -> Counter[str]:
    return Counter(problem.kind for problem in run.problems)


class TestBadLogs:
    def test_no_such_path(self, tmp_path: Path) -> None:
        with pytest.raises(NoLogError, match="does not exist; give the folder set in DDPAN_LOG_DIR"):
            load(tmp_path / "nowhere")

    def test_empty_folder(self, tmp_path: Path) -> None:
        with pytest.raises(NoLogError, match="no ddpan log in"):
            load(tmp_path)
        with pytest.raises(NoLogError, match="no ddpan log in"):
            find_runs(tmp_path)

    def test_folder_of_other_things(self, tmp_path: Path) -> None:
        (tmp_path / "rank-00000").mkdir()
        (tmp_path / "rank-00000" / "train.log").write_text("loss 0.3")
        with pytest.raises(NoLogError, match="no ddpan log in"):
            load(tmp_path)

    def test_file_instead_of_a_folder(self, tmp_path: Path) -> None:
        (tmp_path / "trace.json").write_text("{}")
        with pytest.raises(NoLogError, match="is a file"):
            load(tmp_path / "trace.json")

    def test_text_named_like_a_part(self, tmp_path: Path) -> None:
        (tmp_path / "steps-000000.parquet").write_text("this is no Parquet file at all")
        with pytest.raises(DamagedLogError, match="truncated or no Parquet file"):
            load(tmp_path)

    def test_parquet_of_another_tool(self, tmp_path: Path) -> None:
        pl.DataFrame({"a": [1]}).write_parquet(tmp_path / "steps-000000.parquet")
        with pytest.raises(DamagedLogError, match="not ddpan's"):
            load(tmp_path)

    def test_truncated_part(self, folder: Path, small: SyntheticRun) -> None:
        part = folder / "rank-00001" / "collectives-000001.parquet"
        part.write_bytes(part.read_bytes()[:-100])
        run = load(folder)
        assert [(p.kind, p.ranks) for p in run.problems] == [("truncated_part", (1,))]
        assert str(part) in run.problems[0].message
        lost = (pl.col("rank") == 1) & pl.col("step").is_between(4, 7)
        assert_frame_equal(run.collectives().collect(), small.collectives.filter(~lost))
        assert_frame_equal(run.steps().collect(), small.steps)

    def test_part_damaged_in_the_middle_is_left_out_of_the_blocks(self, folder: Path, small: SyntheticRun) -> None:
        part = folder / "rank-00001" / "collectives-000001.parquet"
        data = bytearray(part.read_bytes())
        data[4:200] = bytes(196)
        part.write_bytes(data)
        reader = load(folder).blocks()
        assert sum(block.collectives.height for block in reader) == small.collectives.height - 16
        assert [p.kind for p in reader.problems] == ["damaged_part"]
        assert str(part) in reader.problems[0].message

    def test_truncated_spool(self, tmp_path: Path, small: SyntheticRun) -> None:
        folder = write_log(small, tmp_path, steps_per_part=100, spool=True)
        spool = folder / "rank-00002" / "live-000000.spool"
        spool.write_bytes(spool.read_bytes()[: -(16 + 10) * 64])
        run = load(folder)
        assert kinds(run) == {"truncated_spool": 1, "not_closed": 1}
        # Step 0 has one bucket and eleven steps have four; the last ten records are cut off.
        assert run.collectives().filter(rank=2).collect().height == 1 + 11 * 4 - 10
        assert run.steps().filter(rank=2).collect().height == 12

    def test_spool_shorter_than_its_header(self, tmp_path: Path, small: SyntheticRun) -> None:
        folder = write_log(small, tmp_path, steps_per_part=6, spool=True)
        spool = folder / "rank-00002" / "live-000001.spool"
        spool.write_bytes(spool.read_bytes()[:1000])
        run = load(folder)
        assert kinds(run) == {"truncated_spool": 1, "not_closed": 1}
        assert run.steps().filter(rank=2).collect()["step"].to_list() == list(range(6))

    def test_missing_rank(self, folder: Path) -> None:
        shutil.rmtree(folder / "rank-00001")
        run = load(folder)
        assert (run.ranks, run.world_size) == ((0, 2), 3)
        assert [(p.kind, p.ranks) for p in run.problems] == [("missing_rank", (1,))]
        assert "rank 1 of 3" in run.problems[0].message

    def test_rank_of_which_nothing_can_be_read(self, folder: Path) -> None:
        for part in (folder / "rank-00001").iterdir():
            part.write_bytes(b"PAR1")
        run = load(folder)
        assert run.ranks == (0, 2)
        assert kinds(run) == {"truncated_part": 6, "unreadable_rank": 1, "missing_rank": 1}

    def test_nothing_can_be_read(self, folder: Path) -> None:
        for part in folder.rglob("*.parquet"):
            part.write_bytes(part.read_bytes()[:20])
        with pytest.raises(DamagedLogError, match="truncated"):
            load(folder)

    def test_two_runs_in_one_folder(self, folder: Path, small: SyntheticRun) -> None:
        newer = dataclasses.replace(SMALL, ranks=2, run="20260102T040000-00000001", start_ns=SMALL.start_ns + 10**12)
        write_log(simulate(newer), folder.parent)
        run = load(folder.parent)
        assert (run.id, run.world_size, run.ranks) == (newer.run, 2, (0, 1))
        assert kinds(run) == {"several_runs": 1}
        assert f"2 runs in {folder.parent}" in run.problems[0].message
        older = load(folder.parent, run=SMALL.run[:16])
        assert (older.id, older.ranks, older.problems) == (SMALL.run, (0, 1, 2), ())
        assert_frame_equal(older.steps().collect(), small.steps)
        with pytest.raises(UsageError, match="fits several runs"):
            load(folder.parent, run="2026")
        assert [(info.id, info.world_size) for info in find_runs(folder.parent)] == [(newer.run, 2), (SMALL.run, 3)]

    def test_ranks_of_two_runs_in_one_folder_are_kept_apart(self, folder: Path) -> None:
        restarted = dataclasses.replace(
            SMALL, ranks=2, run="20260102T040000-00000001", start_ns=SMALL.start_ns + 10**12
        )
        other = write_log(simulate(restarted), folder.parent.parent / "other")
        for rank in other.iterdir():
            rank.rename(folder / f"attempt-2-{rank.name}")
        assert [(info.id, info.ranks) for info in find_runs(folder)] == [
            (restarted.run, (0, 1)),
            (SMALL.run, (0, 1, 2)),
        ]

    def test_copy_of_a_rank_counts_once(self, folder: Path, small: SyntheticRun) -> None:
        shutil.copytree(folder / "rank-00001", folder / "rank-00001-copy")
        run = load(folder)
        assert kinds(run) == {"duplicate_rank": 1}
        assert_frame_equal(run.steps().collect(), small.steps)

    def test_newer_schema_version(self, folder: Path, small: SyntheticRun) -> None:
        def rewrite(rank: int) -> None:
            metadata = {**small.metadata[rank], "schema_version": SCHEMA_VERSION + 1}
            for number in range(3):
                path = folder / f"rank-0000{rank}" / f"steps-00000{number}.parquet"
                rows = pl.read_parquet(path)
                rows.write_parquet(path, metadata={METADATA_KEY: json.dumps(metadata)})
                path.with_name(f"collectives-00000{number}.parquet").unlink()

        rewrite(2)
        run = load(folder)
        assert run.ranks == (0, 1)
        assert kinds(run) == {"newer_schema": 1, "missing_rank": 1}
        rewrite(0)
        rewrite(1)
        with pytest.raises(NoLogError, match=f"format version {SCHEMA_VERSION + 1}.*upgrade ddpan"):
            load(folder)

    @pytest.mark.parametrize("fault", ["directory", "dangling link"])
    def test_part_that_cannot_be_read(self, folder: Path, small: SyntheticRun, fault: str) -> None:
        part = folder / "rank-00000" / "steps-000002.parquet"
        part.unlink()
        if fault == "directory":
            part.mkdir()
        else:
            part.symlink_to(folder / "gone")
        run = load(folder)
        assert [(p.kind, p.ranks) for p in run.problems] == [("unreadable_file", (0,))]
        assert str(part) in run.problems[0].message
        assert_frame_equal(run.steps().collect(), small.steps.filter((pl.col("rank") != 0) | (pl.col("step") < 8)))

    def test_part_without_permission(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        opened = Path.open

        def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:
            if path.name == "collectives-000000.parquet":
                raise PermissionError(13, "Permission denied", str(path))
            return opened(path, *args, **kwargs)

        monkeypatch.setattr(Path, "open", refuse)
        run = load(folder)
        assert kinds(run) == {"unreadable_file": 3}
        assert all("Permission denied" in problem.message for problem in run.problems)

    def test_spool_without_permission(
        self, tmp_path: Path, small: SyntheticRun, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = write_log(small, tmp_path, steps_per_part=6, spool=True)

        def refuse(path: Path) -> bytes:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "read_bytes", refuse)
        run = load(folder)
        assert kinds(run) == {"unreadable_file": 3, "not_closed": 1}
        assert run.steps().collect()["step"].max() == 5

    def test_folder_that_cannot_be_listed(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        listed = os.scandir

        def refuse(path: Any) -> Any:
            if str(path).endswith("rank-00001"):
                raise PermissionError(13, "Permission denied", str(path))
            return listed(path)

        monkeypatch.setattr(os, "scandir", refuse)
        run = load(folder)
        assert run.ranks == (0, 2)
        assert kinds(run) == {"unreadable_file": 1, "missing_rank": 1}

    def test_hole_in_the_parts(self, folder: Path, small: SyntheticRun) -> None:
        for table in ("steps", "collectives"):
            (folder / "rank-00002" / f"{table}-000001.parquet").unlink()
        run = load(folder)
        assert [(p.kind, p.ranks) for p in run.problems] == [("gap_in_parts", (2,))]
        assert "steps-000001.parquet, collectives-000001.parquet" in run.problems[0].message
        lost = (pl.col("rank") == 2) & pl.col("step").is_between(4, 7)
        assert_frame_equal(run.steps().collect(), small.steps.filter(~lost))

    def test_parts_that_the_recorder_removed_again(self, tmp_path: Path, small: SyntheticRun) -> None:
        limited: Any = {rank: {**one, "settings": {"limit": "1000000,oldest"}} for rank, one in small.metadata.items()}
        folder = write_log(dataclasses.replace(small, metadata=limited), tmp_path, steps_per_part=3)
        for rank in (0, 2):
            for table in ("steps", "collectives"):
                (folder / f"rank-0000{rank}" / f"{table}-000000.parquet").unlink()
        run = load(folder)
        assert [(p.kind, p.ranks) for p in run.problems] == [("removed_parts", (0, 2))]
        (folder / "rank-00001" / "steps-000002.parquet").unlink()
        assert kinds(load(folder)) == {"removed_parts": 1, "gap_in_parts": 1}

    def test_rank_that_was_killed_between_parts(self, folder: Path) -> None:
        for table in ("steps", "collectives"):
            (folder / "rank-00000" / f"{table}-000002.parquet").unlink()
        assert [(p.kind, p.ranks) for p in load(folder).problems] == [("not_closed", (0,))]
