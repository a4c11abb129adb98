"""The answer in words, with which every report begins."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import polars as pl
import pytest
from tests.analysis.reports.made import VERDICT, judged

from ddpan.analysis import Summary, Verdict
from ddpan.analysis.reports._answer import answer

LATE = "18.4 ms later than the other ranks (95 % confidence interval 17.1 to 19.6 ms)"


class TestAnswer:
    def test_slow_rank(self, summaries: dict[str, Summary]) -> None:
        first, cost, step = answer(summaries["slow"])
        amount = re.fullmatch(
            r"Rank 2 \(on host-000\) is slow in loading its data: in nearly every step it is (\S+) ms later than the "
            r"other ranks \(95 % confidence interval (\S+) to (\S+) ms\)\.",
            first,
        )
        assert amount is not None
        delay, low, high = map(float, amount.groups())
        assert low < 30 < high
        assert delay == pytest.approx(30, rel=0.03)
        assert re.fullmatch(
            r"The other ranks wait for it: a step takes \S+ ms on average and would take \S+ ms without the delay, "
            r"so \d+ % of the time is lost: \S+ s in 98 steps\.",
            cost,
        )
        assert step.startswith("Next: look at the input of rank 2: number of DataLoader workers")

    @pytest.mark.parametrize(
        ("changes", "first"),
        [
            (
                {"cause": "backward", "first_late_bucket": 4},
                f"Rank 1 (on host-000) is slow in its backward pass: in nearly every step it is {LATE},"
                " from gradient bucket 4 on.",
            ),
            (
                {"cause": "backward", "first_late_bucket": 4, "first_late_parameters": ("a.weight", "a.bias", "b")},
                f"Rank 1 (on host-000) is slow in its backward pass: in nearly every step it is {LATE},"
                " from gradient bucket 4 on (a.weight and 2 more parameters).",
            ),
            (
                {"cause": "backward", "first_late_bucket": 0},
                f"Rank 1 (on host-000) is slow in its backward pass: in nearly every step it is {LATE},"
                " already before the first gradient bucket (the loss, or the last layers of the "
                "model).",
            ),
            (
                {"cause": "forward", "kind": "onset", "first_step": 512},
                f"Rank 1 (on host-000) is slow in its forward pass: in every step since step 512 it is {LATE}.",
            ),
            (
                {"cause": "optimizer", "kind": "transient", "first_step": 60, "last_step": 110},
                f"Rank 1 (on host-000) is slow in its optimizer step: in steps 60 to 110 it is {LATE}.",
            ),
            (
                {"cause": "other", "kind": "intermittent", "affected_steps": 30},
                "Rank 1 (on host-000) is slow in code of its training loop outside data loading, "
                f"forward, backward and optimizer: now and then, in 30 of 1,000 steps, it is {LATE}.",
            ),
            (
                {"cause": None, "delay_low_ns": None, "rank": 77},
                "Rank 77 is slow in a part of the step that the log does not show: in nearly every "
                "step it is 18.4 ms later than the other ranks.",
            ),
        ],
    )
    def test_every_kind_and_cause(self, summaries: dict[str, Summary], changes: dict[str, Any], first: str) -> None:
        lines = answer(judged(summaries["slow"], replace(VERDICT, **changes)))
        assert lines[0] == first
        assert lines[-1].startswith("Next: ")

    def test_cost_in_gpu_hours_where_there_are_gpus(self, summaries: dict[str, Summary]) -> None:
        on_gpus = replace(judged(summaries["slow"], VERDICT), devices=("cuda",))
        assert answer(on_gpus)[1] == (
            "The other ranks wait for it: a step takes 120 ms on average and would take 102 ms without the delay, so "
            "15 % of the time is lost: 18.0 s or 0.32 GPU-hours in 1,000 steps."
        )

    def test_several_slow_ranks(self, summaries: dict[str, Summary]) -> None:
        others = [replace(VERDICT, rank=rank, cause="data", delay_low_ns=None) for rank in range(4, 9)]
        assert answer(judged(summaries["slow"], VERDICT, *others))[2] == (
            "Also slow: rank 4 in loading its data, 18.4 ms in nearly every step; rank 5 in loading its data, 18.4 ms "
            "in nearly every step; rank 6 in loading its data, 18.4 ms in nearly every step; and 2 more ranks. "
            "With all of these put right, a step would take 88.0 ms."
        )

    def test_a_slow_host(self, summaries: dict[str, Summary]) -> None:
        first, cost, step = answer(judged(summaries["slow"], replace(VERDICT, ranks=(4, 5, 6, 7), host="node-7")))
        assert first == (
            f"All 4 ranks of host node-7 (4-7) are slow in their forward pass: in nearly every step they are {LATE}."
        )
        assert cost.startswith("The other ranks wait for them: a step takes 120 ms on average and would take 102 ms")
        assert step.startswith("Next: compare node-7 with another host")

    def test_a_slow_process_group(self, summaries: dict[str, Summary]) -> None:
        first, *_ = answer(judged(summaries["slow"], replace(VERDICT, ranks=(0, 2), group="mesh_dp")))
        assert first.startswith("All 2 ranks of process group mesh_dp (0,2) are slow in their forward pass: in nearly")

    @pytest.mark.parametrize(
        ("kind", "when", "than"),
        [("onset", "since step 512", "before"), ("transient", "in steps 512 to 999", "the others")],
    )
    def test_a_slow_transfer(self, summaries: dict[str, Summary], kind: Any, when: str, than: str) -> None:
        slow = replace(VERDICT, kind=kind, rank=None, ranks=(), cause="collective", first_step=512)
        changed = judged(summaries["slow"], slow)
        first, cost, step = answer(replace(changed, stragglers=replace(changed.stragglers, named=())))
        assert first == (
            f"No rank is late, but the gradient transfer is slow for all of them {when}: each step takes 18.4 ms "
            f"longer than {than} (95 % confidence interval 17.1 to 19.6 ms)."
        )
        assert cost.startswith(
            "A step takes 120 ms on average and would take 102 ms without the delay, so 15 % of the time"
        )
        assert step.startswith("Next: look at the network")

    def test_nobody_is_slow(self, summaries: dict[str, Summary]) -> None:
        first, time, step = answer(summaries["healthy"])
        assert re.fullmatch(
            r"No straggler: none of 4 ranks is regularly later than the others, in 98 steps of 69\.\d ms on average\.",
            first,
        )
        assert re.match(r"Where the time of a step goes: 5\d % backward from the first gradient bucket on, 2\d %", time)
        assert step.startswith("Next: ")

    def test_nobody_is_slow_but_the_step_time_rose(self, summaries: dict[str, Summary]) -> None:
        changing, verdict = summaries["changing"], Verdict(kind="none", reason="", module=0, steps=238)
        changed = replace(changing, stragglers=replace(changing.stragglers, verdict=verdict, named=()))
        _, time, step = answer(changed)
        assert re.match(
            r"The step time rose from 7\d\.\d to 8\d\.\d ms at step 120 \(95 % confidence interval of the change "
            r"1\d\.\d to 1\d\.\d ms\), for all ranks alike\. Where the time of a step goes: ",
            time,
        )
        assert step.startswith("Next: look for what changed for all ranks at step 120")

    @pytest.mark.parametrize(
        ("part", "advice"),
        [
            ("transfer", "bucket_cap_mb"),
            ("wait", "uneven batches"),
            ("data", "DataLoader workers"),
            ("forward", "little"),
        ],
    )
    def test_nobody_is_slow_but_something_could_be_saved(
        self, summaries: dict[str, Summary], part: str, advice: str
    ) -> None:
        split = summaries["healthy"].step_split.with_columns(share=pl.when(part=part).then(0.5).otherwise(0.03))
        assert advice in answer(replace(summaries["healthy"], step_split=split))[2]

    @pytest.mark.parametrize("name", ["alone", "short", "empty"])
    def test_cannot_tell(self, summaries: dict[str, Summary], name: str) -> None:
        reason, _, advice = summaries[name].stragglers.verdict.reason.partition(" Next: ")
        lines = answer(summaries[name])
        assert lines[0] == f"Cannot tell whether a rank is slow. {reason}"
        assert [line for line in lines if line.startswith("Next: ")] == ([f"Next: {advice}"] if advice else [])

    def test_rotating(self, summaries: dict[str, Summary]) -> None:
        verdict = replace(VERDICT, kind="rotating", reason="One is late. Next: look for it.", rank=None, ranks=())
        first, cost, step = answer(judged(summaries["healthy"], verdict))
        assert first == "No single rank is slow. One is late."
        assert re.match(
            r"A step takes 120 ms on average and would take 102 ms without these waits, so 15 % of the time is lost: "
            r"18\.0 s in 1,000 steps\.$",
            cost,
        )
        assert step == "Next: look for it."
