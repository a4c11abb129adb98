"""Facts of runs small enough to be worked out by hand, and the cases that have misled others."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from ddpan.analysis.measures.facts import Facts, facts
from ddpan.analysis.run import find_runs, load
from ddpan.analysis.testing import CAUSES, Fault, Scenario, SyntheticRun, simulate, write_log

CLOCK_NS = {0: 1_700_000_000_000_000_000, 1: 1_700_000_009_000_000_000}


def row(found: Facts, step: int, rank: int) -> dict[str, Any]:
    return found.steps.filter(step=step, rank=rank).row(0, named=True)


def values(frame: pl.DataFrame, column: str, **keys: Any) -> list[Any]:
    return frame.filter(**keys)[column].to_list()


class TestByHand:
    @pytest.mark.parametrize("steps_per_part", [1, 2, 100])
    def test_one_step_in_full(self, by_hand: SyntheticRun, open_run: Any, steps_per_part: int) -> None:
        found = facts(open_run(by_hand, steps_per_part=steps_per_part))
        shared = {
            "module": 0,
            "step": 3,
            "micro_batches": 1,
            "warmup": False,
            "layout": 0,
            "step_time_ns": 1000,
            "data_ns": 50,
            "forward_ns": 200,
            "optimizer_ns": 60,
            "other_ns": 40,
            "c10d_forward_ns": 200,
            "buckets": 2,
            "bytes": 129,
            "transfer_ns": 100 + 200,
            "ranks": 2,
            "complete": True,
        }
        assert row(found, 3, 0) == shared | {
            "rank": 0,
            "forward_start_ns": CLOCK_NS[0] + 3150,
            "step_start_ns": CLOCK_NS[0] + 3000,
            "step_end_ns": CLOCK_NS[0] + 4000,
            "backward_ns": 150,
            "backward_compute_ns": 160,
            "c10d_backward_compute_ns": 160,
            "c10d_backward_comm_ns": 605,
            "c10d_overlap_ns": 110,
            # [400, 700] and [500, 1000] make 600, of which [400, 510] lies before the last gradient.
            "comm_ns": 600,
            "hidden_ns": 110,
            "exposed_ns": 490,
            "tail_ns": 495,
            "arrival_ns": 500,
            "lateness_ns": -150,
            "first_arrival_ns": 400,
            "first_lateness_ns": -100,
            "wait_ns": 200 + 300,
            "last": False,
        }
        assert row(found, 3, 1) == shared | {
            "rank": 1,
            "forward_start_ns": CLOCK_NS[1] + 3150,
            "step_start_ns": CLOCK_NS[1] + 3000,
            "step_end_ns": CLOCK_NS[1] + 4000,
            "backward_ns": 450,
            "backward_compute_ns": 460,
            "c10d_backward_compute_ns": 460,
            "c10d_backward_comm_ns": 405,
            "c10d_overlap_ns": 210,
            # [600, 700] and [800, 1000]; all of the first and [800, 810] lie before the last gradient.
            "comm_ns": 300,
            "hidden_ns": 110,
            "exposed_ns": 190,
            "tail_ns": 195,
            "arrival_ns": 800,
            "lateness_ns": 150,
            "first_arrival_ns": 600,
            "first_lateness_ns": 100,
            "wait_ns": 0,
            "last": True,
        }

    def test_first_step_has_no_start(self, by_hand: SyntheticRun, open_run: Any) -> None:
        found = facts(open_run(by_hand))
        first = row(found, 0, 1)
        unknown = ("step_start_ns", "step_time_ns", "arrival_ns", "lateness_ns", "optimizer_ns", "other_ns", "last")
        assert {name: first[name] for name in unknown} == dict.fromkeys(unknown)
        assert (first["wait_ns"], first["comm_ns"], first["warmup"], first["complete"]) == (0, 300, True, True)

    def test_buckets(self, by_hand: SyntheticRun, open_run: Any) -> None:
        found = facts(open_run(by_hand))
        assert found.buckets.select("bucket", "rank", "n", "bytes").rows() == [
            (0, 0, 3, 64),
            (0, 1, 3, 64),
            (1, 0, 3, 65),
            (1, 1, 3, 65),
        ]
        expected = {
            "lateness": [-100, 100, -150, 150],
            "wait": [200, 0, 300, 0],
            "transfer": [100, 100, 200, 200],
            "duration": [300, 100, 500, 200],
            # Rank 0 after its last gradient: both buckets fly for 190 ns, then bucket 1 alone for 300.
            "exposed": [95, 0, 95 + 300, 190],
            "queue": [5, 5, 10, 10],
        }
        for name, numbers in expected.items():
            assert found.buckets[f"{name}_mean_ns"].to_list() == numbers
            assert found.buckets[f"{name}_median_ns"].to_list() == numbers
        assert found.buckets["last_share"].to_list() == [0.0, 1.0, 0.0, 1.0]

    def test_counts(self, by_hand: SyntheticRun, open_run: Any) -> None:
        found = facts(open_run(by_hand))
        assert (found.step_count, found.warmup_steps, found.incomplete_steps) == (5, 2, 0)
        assert found.gaps.rows() == [(0, 10, 0, 5, 0), (1, 10, 0, 5, 0)]
        assert (found.problems, found.left_out) == ((), {})

    def test_facts_are_computed_once(self, by_hand: SyntheticRun, open_run: Any) -> None:
        run = open_run(by_hand)
        assert facts(run) is facts(run)

    def test_arrival_is_the_sum_of_its_phases(self, open_run: Any) -> None:
        found = facts(open_run(Scenario(steps=30, micro_batches=3, noise=0.2)))
        phases = pl.sum_horizontal("data_ns", "forward_ns", "backward_ns", "optimizer_ns", "other_ns")
        known = found.steps.filter(pl.col("arrival_ns").is_not_null())
        assert known.height == 29 * 4
        assert known.select((phases == pl.col("arrival_ns")).all()).item()


class TestShapes:
    def test_layouts_are_kept_apart(self, open_run: Any) -> None:
        """CASES: step 0 has another bucket layout than step 1 on."""
        found = facts(open_run(Scenario(ranks=2, steps=20, buckets=5), skip_warmup=0))
        sizes = found.buckets.filter(rank=0).select("layout", "bucket", "bytes", "wait_mean_ns")
        assert sizes["layout"].to_list() == [0] + [1] * 5
        assert sizes["bytes"].to_list() == [5 * (25 << 20)] + [25 << 20] * 5
        assert found.steps.filter(rank=0)["buckets"].to_list() == [1] + [5] * 19

    @pytest.mark.parametrize(
        ("rebuilt", "skip_warmup", "expected"), [(True, None, 2), (False, None, 2), (True, 7, 7), (True, 0, 0)]
    )
    def test_warm_up(self, open_run: Any, rebuilt: bool, skip_warmup: int | None, expected: int) -> None:
        found = facts(open_run(Scenario(steps=20, rebuilt=rebuilt), skip_warmup=skip_warmup))
        assert found.warmup_steps == expected
        assert found.steps.filter("warmup")["step"].unique().to_list() == list(range(expected))
        assert found.steps["layout"].n_unique() == (2 if rebuilt else 1)

    def test_first_layout_is_warm_up_as_long_as_it_lasts(self, open_run: Any) -> None:
        run = simulate(Scenario(ranks=2, steps=10, rebuilt=False))
        later = pl.when(pl.col("step") < 4).then(0).otherwise(1).cast(pl.UInt16)
        found = facts(open_run(dataclasses.replace(run, collectives=run.collectives.with_columns(layout=later))))
        assert found.steps.filter("warmup")["step"].unique().to_list() == [0, 1, 2, 3]

    def test_gradient_accumulation(self, open_run: Any) -> None:
        """CASES: communication in each fourth forward; the three others are no anomalies."""
        scenario = Scenario(ranks=2, steps=10, micro_batches=4, noise=0.0)
        found = facts(open_run(scenario))
        step = row(found, 5, 0)
        assert (found.step_count, found.incomplete_steps, step["micro_batches"]) == (10, 0, 4)
        assert step["data_ns"] == 4 * scenario.data_ns
        assert step["forward_ns"] == 4 * scenario.forward_ns
        # Between two forwards lie a backward, the wait for data, and 0.5 ms of other code that cannot be told apart.
        assert step["backward_ns"] == 4 * scenario.backward_ns + 3 * scenario.other_ns
        assert step["backward_compute_ns"] == scenario.backward_ns
        assert step["other_ns"] == scenario.other_ns + scenario.copy_ns
        assert step["c10d_forward_ns"] == scenario.forward_ns

    def test_step_that_lacks_a_micro_batch(self, open_run: Any) -> None:
        run = simulate(Scenario(ranks=2, steps=6, micro_batches=3))
        lost = (pl.col("rank") == 0) & (pl.col("step") == 3) & (pl.col("micro_batch") == 1)
        found = facts(open_run(dataclasses.replace(run, steps=run.steps.filter(~lost))))
        poor = row(found, 3, 0)
        assert (poor["data_ns"], poor["forward_ns"], poor["backward_ns"], poor["other_ns"]) == (None,) * 4
        assert poor["lateness_ns"] is not None
        assert poor["micro_batches"] == 3

    def test_two_groups_are_compared_apart(self, open_run: Any) -> None:
        """Ranks 0, 1 and ranks 2, 3 replicate different stages: only their own peers tell whether they are late."""
        run = simulate(Scenario(ranks=4, steps=20, noise=0.0))
        slower = pl.col("rank") >= 2
        late = 7_000_000 * (pl.col("step") + 1)
        metadata: Any = {}
        for rank, one in run.metadata.items():
            groups = {"0": {"name": "stage", "ranks": [0, 1] if rank < 2 else [2, 3], "backend": "gloo"}}
            metadata[rank] = {**one, "groups": groups}
        moved = [
            pl.when(slower).then(pl.col(name) + late.cast(pl.Int64)).otherwise(name).alias(name)
            for name in ("launch_ns", "end_ns", "ready_ns")
        ]
        run = dataclasses.replace(run, collectives=run.collectives.with_columns(moved), metadata=metadata)
        found = facts(open_run(run))
        known = found.steps.filter(~pl.col("warmup"))
        assert known["lateness_ns"].unique().to_list() == [0]
        assert known["ranks"].unique().to_list() == [2]
        times = known.group_by("rank", maintain_order=True).agg(pl.col("step_time_ns").mean())["step_time_ns"].to_list()
        assert times[2] - times[0] == pytest.approx(7_000_000)
        assert found.steps.select("step", "rank").rows()[:5] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]

    def test_modules_are_kept_apart(self, by_hand: SyntheticRun, open_run: Any) -> None:
        """A process with two DDP modules: every third step of module 0 is followed by one of module 1."""
        hand = by_hand
        second = [
            frame.filter(pl.col("step") % 3 == 0).with_columns(
                module=pl.lit(1, pl.UInt16),
                step=pl.col("step") // 3,
                **({"seq": pl.col("seq") + 100} if "seq" in frame.columns else {}),
            )
            for frame in (hand.steps, hand.collectives)
        ]
        metadata: Any = {
            rank: {**one, "modules": {"0": one["modules"]["0"], "1": one["modules"]["0"]}}
            for rank, one in hand.metadata.items()
        }
        run = dataclasses.replace(
            hand,
            steps=pl.concat([hand.steps, second[0]]),
            collectives=pl.concat([hand.collectives, second[1]]),
            metadata=metadata,
        )
        found = facts(open_run(run))
        assert found.steps.group_by("module", maintain_order=True).len().rows() == [(0, 10), (1, 4)]
        assert found.step_count == 7
        assert values(found.steps, "lateness_ns", module=0, step=3) == [-150, 150]
        assert values(found.steps, "step_time_ns", module=1, step=1) == [3000, 3000]
        assert found.steps.filter(module=1)["warmup"].all()

    def test_static_graph_calls_all_buckets_of_its_first_step_zero(self, open_run: Any) -> None:
        run = simulate(Scenario(ranks=2, steps=10, rebuilt=False, buckets=3))
        first = pl.when(pl.col("step") == 0).then(pl.lit(0, pl.UInt16)).otherwise("bucket")
        found = facts(open_run(dataclasses.replace(run, collectives=run.collectives.with_columns(bucket=first))))
        assert found.incomplete_steps == 0
        assert values(found.steps, "buckets", step=0) == [3, 3]
        assert values(found.steps, "comm_ns", step=0, rank=0)[0] > 0

    def test_attempts_are_never_merged(self, tmp_path: Path) -> None:
        """CASES: a restart at world size 3 after 4, steps starting again at 0."""
        first = Scenario(ranks=4, steps=10)
        again = dataclasses.replace(first, ranks=3, steps=6, run="20260102T040000-1", start_ns=first.start_ns + 10**12)
        for scenario in (first, again):
            write_log(simulate(scenario), tmp_path)
        assert [(info.world_size, info.steps) for info in find_runs(tmp_path)] == [(3, 6), (4, 10)]
        assert facts(load(tmp_path)).steps.height == 3 * 6
        assert facts(load(tmp_path, run=first.run)).steps.height == 4 * 10

    @pytest.mark.parametrize("cause", CAUSES)
    def test_delay_shows_in_the_phase_that_has_it(self, open_run: Any, cause: str) -> None:
        fault = Fault(rank=2, cause=cause, delay_ns=20_000_000)
        found = facts(open_run(Scenario(ranks=4, steps=40, noise=0.0, faults=(fault,))))
        phases = [f"{phase}_ns" for phase in CAUSES]
        known = found.steps.filter(~pl.col("warmup"))
        means = known.group_by("rank", maintain_order=True).agg(pl.col(*phases).mean())
        excess = means.select(pl.col(*phases) - pl.col(*phases).median()).row(2)
        assert dict(zip(CAUSES, excess, strict=True)) == dict.fromkeys(CAUSES, 0) | {cause: 20_000_000}

    def test_delay_in_backward_is_late_from_its_bucket_on(self, open_run: Any) -> None:
        """CASES: the all-reduce makes backward wall times equal on all ranks; the launches tell them apart."""
        fault = Fault(rank=1, cause="backward", delay_ns=200_000_000, bucket=5)
        found = facts(open_run(Scenario(ranks=4, steps=30, buckets=8, noise=0.01, faults=(fault,))))
        known = found.steps.filter(~pl.col("warmup"))
        wall = known.select("rank", wall=pl.col("c10d_backward_compute_ns") + pl.col("tail_ns"))
        means = wall.group_by("rank").agg(pl.col("wall").mean())["wall"].to_numpy()
        assert np.ptp(means) / means.mean() < 0.01
        late = found.buckets.filter(rank=1).sort("bucket")["lateness_median_ns"].to_numpy()
        assert np.abs(late[:5]).max() < 2_000_000
        assert np.abs(late[5:] - 200_000_000).max() < 2_000_000
        assert known.filter("last")["rank"].unique().to_list() == [1]
        assert known.filter(rank=1)["wait_ns"].sum() < known.filter(rank=0)["wait_ns"].sum() / 50
