"""Summaries of runs of many kinds."""

from __future__ import annotations

import math
from dataclasses import replace

import polars as pl
import pytest
from tests.analysis.reports.made import HOSTILE, SCENARIOS

from ddpan.analysis import Problem, Summary, load, summarize
from ddpan.analysis.testing import simulate, write_log


@pytest.fixture(scope="module")
def summaries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Summary]:
    """The summary of each scenario, and of two runs with something odd about them."""
    found = {}
    for name, (scenario, options) in SCENARIOS.items():
        found[name] = summarize(load(write_log(simulate(scenario), tmp_path_factory.mktemp(name)), **options))
    slow = found["slow"]
    ranks = slow.stragglers.ranks.with_columns(host=pl.lit(HOSTILE))
    problems = tuple(Problem("seq_gap", f"rank {rank} of {HOSTILE} lacks rows", (rank,)) for rank in range(40))
    found["hostile"] = replace(
        slow,
        hosts={HOSTILE: (0, 1, 2), "plain": (3,)},
        problems=problems,
        stragglers=replace(slow.stragglers, ranks=ranks),
        changes=found["changing"].changes,
    )
    nan = slow.stragglers.ranks.with_columns(delay_ns=pl.lit(math.nan), wait_ns=pl.lit(math.inf))
    found["not finite"] = replace(slow, stragglers=replace(slow.stragglers, ranks=nan))
    return found


NAMES = [*SCENARIOS, "hostile", "not finite"]


@pytest.fixture(params=NAMES)
def summary(request: pytest.FixtureRequest, summaries: dict[str, Summary]) -> Summary:
    return summaries[request.param]
