"""Reading a run block by block."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from ddpan.analysis.run import load
from ddpan.analysis.testing import Scenario, SyntheticRun, simulate, write_log
from ddpan.analysis.testing.log import write_part
from ddpan.collector.schema import TABLES

SMALL = Scenario(ranks=3, steps=12, buckets=4)


class TestBlocks:
    def test_blocks_hold_whole_steps_in_order_and_everything_once(self, tmp_path: Path) -> None:
        small = simulate(dataclasses.replace(SMALL, steps=40))
        run = load(write_log(small, tmp_path, steps_per_part=7))
        blocks = list(run.blocks())
        assert len(blocks) == 6
        firsts = [block.steps["step"].min() for block in blocks]
        assert firsts == [0, 6, 13, 20, 27, 34]
        for block in blocks:
            assert set(block.steps["step"]) == set(block.collectives["step"])
            assert (block.steps.group_by("step").len()["len"] == 3).all()
        order = ["rank", "step", "seq"]
        assert_frame_equal(pl.concat(b.collectives for b in blocks).sort(order), small.collectives.sort(order))
        assert_frame_equal(pl.concat(b.steps for b in blocks).sort("rank", "step"), small.steps)

    def test_progress_ends_at_one(self, folder: Path) -> None:
        shares: list[float] = []
        list(load(folder).blocks(progress=shares.append))
        assert shares == [pytest.approx(1 / 3), pytest.approx(2 / 3), 1.0]

    def test_chosen_columns(self, folder: Path) -> None:
        block = next(iter(load(folder).blocks(steps=["rank", "module", "step"])))
        assert block.steps.columns == ["rank", "module", "step"]
        assert len(block.collectives.columns) == len(TABLES["collectives"])

    @settings(max_examples=25, deadline=None)
    @given(cuts=st.lists(st.integers(1, 11), min_size=3, max_size=3), seed=st.integers(0, 3))
    def test_ranks_cut_into_parts_at_different_steps(
        self, tmp_path_factory: pytest.TempPathFactory, cuts: list[int], seed: int
    ) -> None:
        small = simulate(dataclasses.replace(SMALL, seed=seed, lost={0: 0.2}))
        folder = tmp_path_factory.mktemp("cuts")
        for rank, cut in enumerate(cuts):
            one = dataclasses.replace(
                small,
                steps=small.steps.filter(rank=rank),
                collectives=small.collectives.filter(rank=rank),
                metadata={rank: small.metadata[rank]},
            )
            write_log(one, folder, steps_per_part=cut)
        blocks = list(load(folder).blocks())
        assert_frame_equal(
            pl.concat(block.collectives for block in blocks).sort("rank", "seq"), small.collectives.sort("rank", "seq")
        )
        spans = [block.steps["step"].unique().sort().to_list() for block in blocks]
        assert [step for span in spans for step in span] == sorted(set(small.steps["step"]))

    def test_collectives_outside_steps_come_along(self, open_run: Any, small: SyntheticRun) -> None:
        nothing = pl.lit(None)
        other = small.collectives.filter(step=3).with_columns(
            group=pl.lit(1, pl.UInt16),
            module=nothing.cast(pl.UInt16),
            step=nothing.cast(pl.UInt32),
            bucket=nothing.cast(pl.UInt16),
            layout=nothing.cast(pl.UInt16),
        )
        run = open_run(dataclasses.replace(small, collectives=small.collectives))
        path = run.path / "rank-00000" / "collectives-000000.parquet"
        mine = pl.concat([small.collectives.filter(rank=0), other.filter(rank=0)])
        write_part(path, "collectives", mine, small.metadata[0])
        rows = pl.concat(block.collectives for block in load(run.path).blocks())
        assert rows["module"].null_count() == 4
        assert rows.height == small.collectives.height + 4
