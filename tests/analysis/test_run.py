"""Finding, opening and reading runs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from ddpan.analysis.errors import UsageError
from ddpan.analysis.run import load
from ddpan.analysis.testing import Scenario, SyntheticRun, write_log
from ddpan.analysis.testing.log import write_part, write_spool
from ddpan.collector.schema import METADATA_KEY, OPS

SMALL = Scenario(ranks=3, steps=12, buckets=4)


def kinds(run: Any) -> Counter[str]:
    return Counter(problem.kind for problem in run.problems)


class TestReading:
    def test_tables_come_back_as_they_were_written(self, folder: Path, small: SyntheticRun) -> None:
        run = load(folder)
        assert_frame_equal(run.steps().collect(), small.steps)
        assert_frame_equal(run.collectives().collect(), small.collectives)
        assert run.collectives().collect_schema()["op"] == pl.Enum(OPS)
        assert run.problems == ()

    def test_what_the_run_says_of_itself(self, folder: Path) -> None:
        run = load(folder)
        assert (run.id, run.path, run.ranks, run.world_size) == (SMALL.run, folder, (0, 1, 2), 3)
        assert (run.info.steps, run.info.hosts, run.info.backend) == (12, ("host-000",), "gloo")
        assert (run.info.job_id, run.info.restart) == (None, 0)
        assert run.info.start.isoformat() == "2026-01-02T03:04:05+00:00"
        assert run.metadata[2]["layouts"]["0"]["1"][0]["bytes"] == 25 << 20

    @pytest.mark.parametrize("level", ["run", "log", "above"])
    def test_path_may_be_the_run_the_log_or_above(self, folder: Path, level: str) -> None:
        path = {"run": folder, "log": folder.parent, "above": folder.parent.parent}[level]
        assert load(path).path == folder
        assert load(str(path)).ranks == (0, 1, 2)

    def test_identity_lies_in_the_files_not_in_their_names(self, folder: Path) -> None:
        renamed = folder.rename(folder.with_name("copy of the log"))
        (renamed / "rank-00001").rename(renamed / "node7")
        run = load(renamed)
        assert (run.id, run.ranks) == (SMALL.run, (0, 1, 2))

    def test_chosen_steps_and_ranks(self, folder: Path, small: SyntheticRun) -> None:
        run = load(folder, steps=(3, 9), ranks=[2, 0])
        assert run.ranks == (0, 2)
        expected = small.steps.filter(pl.col("step").is_between(3, 8) & pl.col("rank").is_in([0, 2]))
        assert_frame_equal(run.steps().collect(), expected)
        assert run.collectives().collect().height == 2 * 6 * 4
        assert kinds(run) == Counter()

    @pytest.mark.parametrize(("steps", "first", "end"), [(slice(3, None), 3, 11), (slice(None, 5), 0, 4)])
    def test_steps_as_slice(self, folder: Path, steps: slice, first: int, end: int) -> None:
        read = load(folder, steps=steps).steps().collect()["step"]
        assert (read.min(), read.max()) == (first, end)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"steps": (5, 5)}, "holds no step"),
            ({"steps": (-1, 5)}, "holds no step"),
            ({"steps": slice(0, 9, 2)}, "consecutive"),
            ({"steps": ("a", 2)}, "whole number"),
            ({"ranks": [0, 7]}, "no log of rank 7; it has ranks 0-2"),
            ({"ranks": []}, "no rank chosen"),
            ({"ranks": [1.5]}, "whole number"),
            ({"skip_warmup": -1}, "0 or more"),
            ({"run": "2030"}, "is no run in"),
            ({"run": ""}, "choose one of"),
        ],
    )
    def test_bad_options(self, folder: Path, options: dict[str, Any], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            load(folder, **options)

    def test_op_that_this_version_does_not_know(self, folder: Path, small: SyntheticRun) -> None:
        rows = small.collectives.filter(rank=0).with_columns(op=pl.lit("all_fold"))
        metadata = json.dumps(small.metadata[0])
        rows.write_parquet(folder / "rank-00000" / "collectives-000002.parquet", metadata={METADATA_KEY: metadata})
        assert "unknown" in load(folder).collectives().collect()["op"].unique()


class TestSpool:
    def test_spool_and_parts_are_one_log(self, tmp_path: Path, small: SyntheticRun) -> None:
        run = load(write_log(small, tmp_path, steps_per_part=5, spool=True))
        assert len(list(tmp_path.rglob("*.spool"))) == 3
        assert_frame_equal(run.steps().collect(), small.steps)
        assert_frame_equal(run.collectives().collect(), small.collectives)
        assert [(p.kind, p.ranks) for p in run.problems] == [("not_closed", (0, 1, 2))]

    def test_segment_that_already_became_parts_counts_once(self, folder: Path, small: SyntheticRun) -> None:
        rows = {"steps": small.steps.filter(rank=0), "collectives": small.collectives.filter(rank=0)}
        write_spool(folder / "rank-00000", 2, rows, small.metadata[0])
        run = load(folder)
        assert_frame_equal(run.steps().collect(), small.steps)
        assert_frame_equal(run.collectives().collect(), small.collectives)

    @pytest.mark.parametrize("left", ["steps", "collectives"])
    def test_spool_stands_in_for_the_part_that_is_not_there_yet(
        self, tmp_path: Path, small: SyntheticRun, left: str
    ) -> None:
        folder = write_log(small, tmp_path, steps_per_part=6, spool=True)
        last = pl.col("step") >= 6
        rows = small.steps if left == "steps" else small.collectives
        for rank, metadata in small.metadata.items():
            path = folder / f"rank-0000{rank}" / f"{left}-000001.parquet"
            write_part(path, left, rows.filter(last & (pl.col("rank") == rank)), metadata)
        run = load(folder)
        assert_frame_equal(run.steps().collect(), small.steps)
        assert_frame_equal(run.collectives().collect(), small.collectives)

    def test_counters_come_from_the_newest_place(self, tmp_path: Path, small: SyntheticRun) -> None:
        folder = write_log(small, tmp_path, steps_per_part=5, spool=True)
        spool = folder / "rank-00001" / "live-000002.spool"
        data = bytearray(spool.read_bytes())
        data[1024:1064] = b"".join(n.to_bytes(8, "little") for n in (2, 70, 0, 5, 0))
        spool.write_bytes(data)
        run = load(folder)
        assert run.metadata[1]["counters"]["dropped"] == {"no_segment": 70, "disk_full": 0, "disk_error": 5}
        lost = {p.kind: (p.message, p.ranks) for p in run.problems}
        assert lost["dropped_events"] == (
            "rank 1 could not keep all events; lost: 5 (disk error), 70 (no segment)",
            (1,),
        )
        assert lost["recorder_errors"][1] == (1,)

    def test_spool_that_becomes_parts_while_it_is_read(self, tmp_path: Path, small: SyntheticRun) -> None:
        folder = write_log(small, tmp_path, steps_per_part=6, spool=True)
        run = load(folder)
        write_log(small, tmp_path, steps_per_part=6)
        for spool in folder.rglob("*.spool"):
            spool.unlink()
        assert_frame_equal(run.steps().collect(), small.steps)
        assert sum(block.collectives.height for block in run.blocks()) == small.collectives.height

    def test_spool_without_live_json(self, tmp_path: Path, small: SyntheticRun) -> None:
        folder = write_log(small, tmp_path, steps_per_part=100, spool=True)
        for path in folder.rglob("live.json"):
            path.unlink()
        run = load(folder)
        assert (run.ranks, run.world_size, run.metadata[0]["host"]) == ((0, 1, 2), 3, "host-000")
        assert_frame_equal(run.collectives().collect(), small.collectives)
