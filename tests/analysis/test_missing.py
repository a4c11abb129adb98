"""What is missing becomes null and is counted; it never becomes zero."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import polars as pl

from ddpan.analysis.measures.facts import Facts, facts
from ddpan.analysis.testing import Fault, Scenario, SyntheticRun, simulate


def row(found: Facts, step: int, rank: int) -> dict[str, Any]:
    return found.steps.filter(step=step, rank=rank).row(0, named=True)


def values(frame: pl.DataFrame, column: str, **keys: Any) -> list[Any]:
    return frame.filter(**keys)[column].to_list()


class TestMissing:
    """What is missing becomes null and is counted; it never becomes zero."""

    def without(self, run: SyntheticRun, *, rank: int, seq: Sequence[int]) -> SyntheticRun:
        lost = (pl.col("rank") == rank) & pl.col("seq").is_in(seq)
        return dataclasses.replace(run, collectives=run.collectives.filter(~lost))

    def test_first_bucket_of_one_rank(self, by_hand: SyntheticRun, open_run: Any) -> None:
        found = facts(open_run(self.without(by_hand, rank=1, seq=[6])))
        other, poor = row(found, 3, 0), row(found, 3, 1)
        assert (other["comm_ns"], poor["comm_ns"], poor["hidden_ns"], poor["c10d_overlap_ns"]) == (
            600,
            None,
            None,
            None,
        )
        assert (other["wait_ns"], other["transfer_ns"], other["first_lateness_ns"]) == (None, None, None)
        # The last bucket is known on both, and with it the lateness.
        assert (other["lateness_ns"], poor["lateness_ns"], poor["last"]) == (-150, 150, True)
        assert (other["complete"], poor["complete"], other["buckets"]) == (False, False, 2)
        assert found.gaps.rows() == [(0, 10, 0, 5, 0), (1, 9, 1, 5, 1)]
        assert found.incomplete_steps == 1
        assert [(p.kind, p.ranks) for p in found.problems] == [("seq_gap", (1,))]
        assert "rank 1 lacks 1 of 10 collectives" in found.problems[0].message
        assert values(found.buckets, "n", bucket=0) == [2, 2]
        assert values(found.buckets, "wait_mean_ns", bucket=0) == [200, 0]

    def test_last_bucket_of_one_rank(self, by_hand: SyntheticRun, open_run: Any) -> None:
        found = facts(open_run(self.without(by_hand, rank=1, seq=[5])))
        assert (row(found, 2, 1)["step_end_ns"], row(found, 3, 1)["step_start_ns"]) == (None, None)
        assert [row(found, step, 0)["lateness_ns"] for step in (2, 3, 4)] == [None, None, -150]
        assert (row(found, 3, 0)["wait_ns"], row(found, 3, 0)["arrival_ns"]) == (500, 500)

    def test_last_bucket_of_all_ranks(self, by_hand: SyntheticRun, open_run: Any) -> None:
        run = self.without(self.without(by_hand, rank=1, seq=[5]), rank=0, seq=[5])
        found = facts(open_run(run))
        assert [row(found, 2, rank)["arrival_ns"] for rank in (0, 1)] == [None, None]
        assert (row(found, 2, 0)["buckets"], row(found, 2, 0)["complete"]) == (2, False)
        assert [p.message for p in found.problems] == ["no rank's log has 1 of the collectives"]

    def test_whole_step_of_one_rank(self, by_hand: SyntheticRun, open_run: Any) -> None:
        run = self.without(by_hand, rank=0, seq=[4, 5])
        run = dataclasses.replace(run, steps=run.steps.filter((pl.col("rank") != 0) | (pl.col("step") != 2)))
        found = facts(open_run(run))
        assert values(found.steps, "rank", step=2) == [1]
        assert (row(found, 2, 1)["lateness_ns"], row(found, 2, 1)["complete"]) == (None, False)
        assert row(found, 4, 1)["lateness_ns"] == 150

    def test_end_that_was_never_seen(self, by_hand: SyntheticRun, open_run: Any) -> None:
        hand = by_hand
        lost = (pl.col("rank") == 0) & (pl.col("seq") == 7)
        rows = hand.collectives.with_columns(end_ns=pl.when(~lost).then("end_ns"))
        found = facts(open_run(dataclasses.replace(hand, collectives=rows)))
        assert (row(found, 3, 0)["comm_ns"], row(found, 3, 0)["lateness_ns"]) == (None, -150)
        assert (row(found, 4, 1)["lateness_ns"], row(found, 3, 1)["wait_ns"]) == (None, None)
        assert found.gaps["steps_incomplete"].to_list() == [1, 0]

    def test_optimizer_that_was_never_seen(self, by_hand: SyntheticRun, open_run: Any) -> None:
        hand = by_hand
        unseen = [pl.lit(None, pl.Int64).alias(f"optimizer_{moment}_ns") for moment in ("start", "end")]
        found = facts(open_run(dataclasses.replace(hand, steps=hand.steps.with_columns(unseen))))
        assert (row(found, 3, 0)["optimizer_ns"], row(found, 3, 0)["other_ns"]) == (None, 100)

    def test_rows_in_any_order(self, open_run: Any) -> None:
        """CASES: one rank's list was sorted otherwise and lost an entry; joined by position it would mislead."""
        scenario = Scenario(ranks=2, steps=40, faults=(Fault(rank=1, cause="forward", delay_ns=4_000_000),), noise=0.0)
        run = self.without(simulate(scenario), rank=0, seq=[100])
        shuffled = pl.concat(
            [run.collectives.filter(rank=0).sample(fraction=1, shuffle=True, seed=3), run.collectives.filter(rank=1)]
        )
        found = facts(open_run(dataclasses.replace(run, collectives=shuffled)))
        late = found.steps.filter(~pl.col("warmup"), rank=1)
        # Half of the delay each, since with two ranks the median lies between them.
        assert late["lateness_ns"].unique().to_list() == [2_000_000]
        assert late.filter("complete")["wait_ns"].unique().to_list() == [0]
        assert set(found.steps.filter(~pl.col("warmup"), rank=0)["wait_ns"]) == {8 * 4_000_000, None}
        assert found.gaps["collectives_missing"].to_list() == [1, 0]

    def test_many_missing_collectives_of_one_rank(self, open_run: Any) -> None:
        """CASES: 2000, 2000, 1740 and 2000 collectives logged by four ranks."""
        run = simulate(Scenario(ranks=4, steps=250, buckets=8, rebuilt=False))
        found = facts(open_run(self.without(run, rank=2, seq=range(700, 960)), steps_per_part=60))
        assert found.gaps["collectives"].to_list() == [2000, 2000, 1740, 2000]
        assert found.gaps["collectives_missing"].to_list() == [0, 0, 260, 0]
        # Positions 700 to 959 are the second half of step 87 up to the end of step 119.
        assert found.incomplete_steps == 33
        incomplete = found.steps.filter(~pl.col("complete"))["step"]
        assert incomplete.unique().to_list() == list(range(87, 120))
        assert found.steps.filter("complete")["wait_ns"].null_count() == 0

    def test_rank_without_backward_times(self, open_run: Any) -> None:
        """CASES: it is left out of the comparison with a warning, and never the fastest."""
        run = simulate(Scenario(ranks=4, steps=30, faults=(Fault(rank=1, cause="data", delay_ns=10_000_000),)))
        third = pl.col("rank") == 3
        unknown = ["compute_end_ns", "backward_end_ns"]
        run = dataclasses.replace(
            run,
            steps=run.steps.with_columns(pl.when(~third).then(pl.col(name)).alias(name) for name in unknown),
            collectives=run.collectives.filter(~third),
        )
        found = facts(open_run(run))
        assert found.left_out == {3: "it has no times of the backward pass"}
        compared = found.steps.filter(~pl.col("warmup"))
        assert compared.filter(rank=3)["lateness_ns"].null_count() == 28
        assert compared.filter(rank=3)["forward_ns"].null_count() == 0
        assert compared.filter("last")["rank"].unique().to_list() == [1]
        assert compared["ranks"].unique().to_list() == [3]
        assert compared["complete"].all()
        assert ("rank_left_out", (3,)) in [(p.kind, p.ranks) for p in found.problems]

    def test_rank_without_collectives(self, open_run: Any) -> None:
        run = simulate(Scenario(ranks=3, steps=20))
        found = facts(open_run(dataclasses.replace(run, collectives=run.collectives.filter(pl.col("rank") != 0))))
        assert found.left_out == {0: "it has no collective with launch and end"}
        assert found.steps.filter(rank=1)["complete"].all()
        assert found.gaps.row(0) == (0, 0, 153, 20, 0)

    def test_rank_that_lost_much_is_still_compared_where_it_can_be(self, open_run: Any) -> None:
        found = facts(open_run(Scenario(ranks=3, steps=60, buckets=30, lost={1: 0.3})))
        assert found.left_out == {}
        assert not found.steps.filter(pl.col("step") > 0)["complete"].any()
        known = found.steps.filter(pl.col("lateness_ns").is_not_null())["step"].n_unique()
        # Rank 1 must have kept the last bucket of the step and of the one before: 0.7 squared of 59 steps.
        assert 15 < known < 43
        assert found.buckets["n"].to_numpy().min() > 15

    def test_rank_that_ends_early(self, open_run: Any) -> None:
        """CASES: with uneven inputs rank 1 ends at step 60 of 100; the others are compared on."""
        run = simulate(Scenario(ranks=3, steps=100))
        here = (pl.col("rank") != 1) | (pl.col("step") < 60)
        run = dataclasses.replace(run, steps=run.steps.filter(here), collectives=run.collectives.filter(here))
        found = facts(open_run(run, steps_per_part=30))
        assert found.steps.filter(rank=1)["step"].max() == 59
        assert found.incomplete_steps == 0
        assert values(found.steps, "ranks", rank=0, step=59) == [3]
        assert values(found.steps, "ranks", rank=0, step=60) == [2]
        assert found.steps.filter(pl.col("step") > 59)["lateness_ns"].null_count() == 0
        # The median of three ranks is one of them, that of two lies between them.
        late = found.steps.filter(step=80)["lateness_ns"].to_list()
        assert late[0] == -late[1] != 0

    def test_rank_that_joined(self, open_run: Any) -> None:
        """It follows the others' collectives with buckets of zeros; these are no steps of its own."""
        run = simulate(Scenario(ranks=3, steps=40))
        metadata: Any = {**run.metadata}
        metadata[1] = {**metadata[1], "modules": {"0": {**metadata[1]["modules"]["0"], "joined_after_step": 24}}}
        here = (pl.col("rank") != 1) | (pl.col("step") <= 24)
        found = facts(open_run(dataclasses.replace(run, steps=run.steps.filter(here), metadata=metadata)))
        assert found.steps.filter(rank=1)["step"].max() == 24
        assert values(found.steps, "ranks", rank=0, step=25) == [2]
        assert (found.incomplete_steps, found.gaps["collectives_missing"].to_list()) == (0, [0, 0, 0])
        message = "rank 1 ran out of inputs after step 24 and joined: its numbers end there"
        assert [(p.kind, p.ranks, p.message) for p in found.problems] == [("joined", (1,), message)]

    def test_steps_that_were_not_to_be_recorded(self, open_run: Any) -> None:
        run = simulate(Scenario(ranks=2, steps=40, rebuilt=False))
        sampled = pl.col("step") % 10 < 2
        metadata: Any = {rank: {**one, "settings": {"steps": "0:,every=10"}} for rank, one in run.metadata.items()}
        run = dataclasses.replace(
            run, steps=run.steps.filter(sampled), collectives=run.collectives.filter(sampled), metadata=metadata
        )
        found = facts(open_run(run))
        assert found.problems == ()
        assert (found.step_count, found.warmup_steps, found.incomplete_steps) == (8, 2, 0)
        known = found.steps.filter(pl.col("step_time_ns").is_not_null())["step"].unique().to_list()
        assert known == [1, 11, 21, 31]

    def test_beginning_of_one_rank(self, open_run: Any) -> None:
        run = simulate(Scenario(ranks=3, steps=50))
        here = (pl.col("rank") != 2) | (pl.col("step") >= 20)
        run = dataclasses.replace(run, steps=run.steps.filter(here), collectives=run.collectives.filter(here))
        found = facts(open_run(run, steps_per_part=10))
        assert found.incomplete_steps == 0
        assert values(found.steps, "lateness_ns", rank=2, step=20) == [None]
        assert values(found.steps, "lateness_ns", rank=2, step=21) != [None]

    def test_no_collectives_at_all(self, open_run: Any) -> None:
        run = simulate(Scenario(ranks=1, steps=5))
        found = facts(open_run(dataclasses.replace(run, collectives=run.collectives.clear())))
        assert found.steps["buckets"].to_list() == [0] * 5
        assert found.steps.select("comm_ns", "lateness_ns", "wait_ns", "layout").null_count().row(0) == (5, 5, 5, 5)
        assert found.steps["forward_ns"].null_count() == 0
        assert found.buckets.is_empty()

    def test_no_rows_at_all(self, open_run: Any) -> None:
        run = simulate(Scenario(ranks=2, steps=3))
        found = facts(open_run(dataclasses.replace(run, steps=run.steps.clear(), collectives=run.collectives.clear())))
        assert (found.steps.height, found.buckets.height, found.step_count) == (0, 0, 0)
        assert found.gaps.rows() == [(0, 0, 0, 0, 0), (1, 0, 0, 0, 0)]

    def test_one_rank_alone_is_never_late(self, open_run: Any) -> None:
        found = facts(open_run(Scenario(ranks=1, steps=10)))
        assert found.steps.filter(step=5).select("lateness_ns", "wait_ns", "ranks").row(0) == (0, 0, 1)

    def test_positions_that_ranks_disagree_about(self, open_run: Any) -> None:
        run = simulate(Scenario(ranks=3, steps=20, rebuilt=False))
        shifted = pl.when((pl.col("rank") == 2) & (pl.col("step") >= 10)).then(pl.col("seq") + 1).otherwise("seq")
        found = facts(open_run(dataclasses.replace(run, collectives=run.collectives.with_columns(seq=shifted))))
        assert found.steps.filter(pl.col("step") < 10)["complete"].all()
        assert not found.steps.filter(pl.col("step") >= 10)["complete"].any()
        assert found.steps.filter(pl.col("step") >= 10)["wait_ns"].null_count() == 30
        assert "seq_mismatch" in {problem.kind for problem in found.problems}
