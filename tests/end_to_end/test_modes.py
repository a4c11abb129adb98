"""The collector goes wherever DDP goes: each way of using DDP, trained twice, with the collector and without."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from .modes import MODES, Log, Mode, Run

if TYPE_CHECKING:
    from .conftest import Outcome, RankLog, RunLog

Launch = Callable[..., "Outcome"]
ReadRuns = Callable[[Path], "list[RunLog]"]

RANKS = {"three": 3, "four": 4, "late": 3, "spawned": 2}


@dataclass(frozen=True)
class Pair:
    """A launch without the collector and the same launch with it.

    Attributes:
        off: by rank, what the script wrote about each mode.
        on: the same, recorded.
        runs: what was recorded.
    """

    off: list[Any]
    on: list[Any]
    runs: list[RunLog]

    def runs_of(self, mode: Mode) -> list[Run]:
        """The runs that began while rank 0 was in the mode."""
        facts = [of_rank[mode.name] for of_rank in self.on]
        begin_ns, end_ns = facts[0]["begin_ns"], facts[0]["end_ns"]
        return [
            {rank: _log(log, facts[rank]["told"]) for rank, log in run.ranks.items()}
            for run in self.runs
            if begin_ns <= run.ranks[0].metadata["clock"]["anchor_epoch_ns"] <= end_ns
        ]


def _log(log: RankLog, told: dict[str, Any]) -> Log:
    return Log(
        rank=log.metadata["rank"],
        steps=log.steps.to_dicts(),
        collectives=log.collectives.to_dicts(),
        metadata=dict(log.metadata),
        told=told,
    )


@pytest.fixture(scope="session")
def pair(
    request: pytest.FixtureRequest,
    launch: Launch,
    run_python: Launch,
    read_runs: ReadRuns,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Mode], Pair]:
    """Starts the launch that a mode belongs to, with all of its modes that were asked for, once."""
    wanted = {
        item.callspec.params["mode"].name
        for item in request.session.items
        if isinstance(item, pytest.Function) and "mode" in getattr(getattr(item, "callspec", None), "params", {})
    }
    pairs: dict[str, Pair] = {}

    def start(of_launch: str, arguments: list[str], log_dir: Path | None) -> list[Any]:
        ranks = RANKS[of_launch]
        if of_launch == "spawned":
            outcome = run_python("run_modes", *arguments, log_dir=log_dir)
        else:
            outcome = launch("run_modes", *arguments, ranks=ranks, log_dir=log_dir, timeout=280)
        return [outcome.facts(rank) for rank in range(ranks)]

    def pair_of(mode: Mode) -> Pair:
        if mode.launch not in pairs:
            names = [other.name for other in MODES if other.launch == mode.launch and other.name in wanted]
            logs = tmp_path_factory.mktemp("logs")
            late = mode.launch == "late"
            off = start(mode.launch, ["-", *names], None)
            on = start(mode.launch, [str(logs) if late else "-", *names], None if late else logs)
            pairs[mode.launch] = Pair(off, on, read_runs(logs))
        return pairs[mode.launch]

    return pair_of


@pytest.fixture(params=MODES, ids=lambda mode: mode.name)
def mode(request: pytest.FixtureRequest) -> Mode:
    """Each mode."""
    of_request: Mode = request.param
    return of_request


def test_training_is_unchanged(mode: Mode, pair: Callable[[Mode], Pair]) -> None:
    """Parameters, buffers and gradients are the same to the bit."""
    both = pair(mode)
    for off, on in zip(both.off, both.on, strict=True):
        assert on[mode.name]["tensors"] == off[mode.name]["tensors"] != []


def test_nothing_is_said_or_lost(mode: Mode, pair: Callable[[Mode], Pair]) -> None:
    """No warning, no error in the collector, nothing dropped."""
    both = pair(mode)
    for on in both.on:
        assert [line for line in on[mode.name]["said"] if "recording" not in line] == []
    for run in both.runs_of(mode):
        for log in run.values():
            assert log.metadata["closed"]
            counters = log.metadata["counters"]
            assert counters["errors"] == counters["late_ends"] == sum(counters["dropped"].values()) == 0


def test_ranks_join(mode: Mode, pair: Callable[[Mode], Pair]) -> None:
    """Rows with the same group and number are the same collective on all ranks of the group."""
    for run in pair(mode).runs_of(mode):
        seen: dict[tuple[int, int], dict[int, Any]] = {}
        for log in run.values():
            for row in log.collectives:
                seen.setdefault((row["group"], row["seq"]), {})[log.rank] = (row["op"], row["bytes"], row["bucket"])
        groups = {number: info for log in run.values() for number, info in log.metadata["groups"].items()}
        joined = any(
            info["joined_after_step"] is not None for log in run.values() for info in log.metadata["modules"].values()
        )
        for (group, _), by_rank in seen.items():
            assert sorted(by_rank) == sorted(groups[str(group)]["ranks"])
            what = {(op, size) if joined else (op, size, bucket) for op, size, bucket in by_rank.values()}
            assert len(what) == 1, by_rank


def test_rows_are_what_happened(
    mode: Mode, pair: Callable[[Mode], Pair], record_property: Callable[[str, object], None]
) -> None:
    runs = pair(mode).runs_of(mode)
    for name, value in summary(runs).items():
        record_property(name, value)
    record_property("torch", torch.__version__)
    mode.expect(runs)


def summary(runs: list[Run]) -> dict[str, object]:
    """What the table in the documentation says of a mode."""
    logs = [log for run in runs for log in run.values()]
    return {
        "tap": logs[0].metadata["tap"],
        "forwards": sum(len(log.steps) for log in logs),
        "buckets": sum(row["bucket"] is not None for log in logs for row in log.collectives),
        "others": sum(row["bucket"] is None for log in logs for row in log.collectives),
    }
