"""Summaries whose answer is known, for the tests of the reports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

from ddpan.analysis import Summary, Verdict
from ddpan.analysis.reports import REPORTS
from ddpan.analysis.testing import Fault, Scenario

__all__ = ["HOSTILE", "MS", "SCENARIOS", "VERDICT", "judged", "parse"]

MS = 1_000_000
HOSTILE = "\x1b[31mgpu|1`<b>\n"

SLOW = Scenario(noise=0.02, faults=(Fault(rank=2, cause="data", delay_ns=30 * MS),))
SCENARIOS: Mapping[str, tuple[Scenario, dict[str, Any]]] = {
    "healthy": (Scenario(noise=0.02), {}),
    "slow": (SLOW, {}),
    "many": (replace(SLOW, ranks=24, buckets=20, steps=40), {}),
    "changing": (
        Scenario(
            steps=240,
            noise=0.02,
            faults=(
                *(Fault(rank=rank, cause="forward", delay_ns=12 * MS, first_step=120) for rank in range(4)),
                Fault(rank=3, cause="data", delay_ns=5 * MS, first_step=60, end_step=180),
            ),
        ),
        {},
    ),
    "accumulating": (replace(SLOW, micro_batches=3, steps=40), {}),
    "alone": (Scenario(ranks=1, steps=40), {}),
    "short": (Scenario(steps=5), {}),
    "lossy": (replace(SLOW, steps=60, lost={1: 0.2}), {}),
    "empty": (Scenario(steps=5), {"steps": (1000, 2000)}),
}

VERDICT = Verdict(
    kind="persistent",
    reason="",
    module=0,
    steps=1000,
    step_time_ns=120e6,
    rank=1,
    ranks=(1,),
    cause="forward",
    first_step=2,
    last_step=999,
    affected_steps=1000,
    delay_ns=18.4e6,
    delay_low_ns=17.1e6,
    delay_high_ns=19.6e6,
    confidence=0.95,
    last_share=1.0,
    p_value=1e-9,
    step_time_without_ns=102e6,
    lost_seconds=18.0,
    lost_gpu_hours=0.32,
)


def judged(summary: Summary, verdict: Verdict, *others: Verdict) -> Summary:
    """``summary`` with other verdicts."""
    return replace(
        summary,
        stragglers=replace(
            summary.stragglers, verdict=verdict, named=(verdict, *others), step_time_without_all_ns=88e6
        ),
    )


def refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is no JSON")


def parse(summary: Summary) -> dict[str, Any]:
    parsed = json.loads(REPORTS["json"](summary), parse_constant=refuse)
    assert isinstance(parsed, dict)
    return parsed
