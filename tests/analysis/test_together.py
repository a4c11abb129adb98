"""The verdict on ranks that are slow together, and on a transfer that is slow for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ddpan.analysis.measures.stragglers import stragglers
from ddpan.analysis.run import Run
from ddpan.analysis.testing import Fault, Scenario, simulate

OpenRun = Callable[..., Run]
MS = 1_000_000
# A step takes about 70 ms without a fault.
HEALTHY = Scenario(ranks=4, steps=120, buckets=8, noise=0.05, seed=11)


def faulty(*faults: Fault, scenario: Scenario = HEALTHY) -> Scenario:
    return replace(scenario, faults=faults)


def delayed(rank: int, cause: str = "backward", delay_ms: float = 20, **more: Any) -> Fault:
    return Fault(rank=rank, cause=cause, delay_ns=round(delay_ms * MS), **more)


def judge(run: Run) -> Any:
    """The verdict; not typed, since what may be None in it is known here."""
    return stragglers(run).verdict


class TestTogether:
    """All ranks of a host or process group are slow."""

    def test_a_slow_host(self, open_run: OpenRun) -> None:
        # Ranks 3 to 5 share the second of three hosts.
        scenario = replace(HEALTHY, ranks=9, ranks_per_host=3)
        slow = tuple(delayed(rank, "forward", 15 + rank) for rank in (3, 4, 5))
        found = stragglers(open_run(faulty(*slow, scenario=scenario)))
        (verdict,) = found.named
        assert (verdict.kind, verdict.host, verdict.group, verdict.cause) == ("persistent", "host-001", None, "forward")
        assert (verdict.rank, verdict.ranks) == (5, (3, 4, 5))
        assert verdict.delay_ns == pytest.approx(19 * MS, rel=0.05)
        assert verdict.last_share == pytest.approx(1, abs=0.02)
        assert verdict.reason.startswith("All ranks of host host-001 (3, 4, 5) are late in nearly every step, in their")
        # The step waits for the latest of them; without any it would wait for the latest of the others.
        assert_cost(verdict, open_run(faulty(scenario=scenario)))

    def test_a_slow_process_group(self, open_run: OpenRun) -> None:
        run = simulate(faulty(*(delayed(rank, "backward") for rank in (1, 4)), scenario=replace(HEALTHY, ranks=6)))
        for metadata in run.metadata.values():
            metadata["groups"]["1"] = {"name": "tensor_parallel_1", "ranks": [1, 4], "backend": "gloo"}
        (verdict,) = stragglers(open_run(run)).named
        assert (verdict.host, verdict.group, verdict.ranks) == (None, "tensor_parallel_1", (1, 4))

    def test_ranks_of_a_host_that_are_not_all_slow_stand_alone(self, open_run: OpenRun) -> None:
        scenario = replace(HEALTHY, ranks=9, ranks_per_host=3)
        found = stragglers(open_run(faulty(delayed(3, "forward"), delayed(4, "forward"), scenario=scenario)))
        assert [(one.ranks, one.host) for one in found.named] in (
            [((3,), None), ((4,), None)],
            [((4,), None), ((3,), None)],
        )
        # One of two equally slow ranks put right gains next to nothing; both do.
        assert found.verdict.step_time_without_ns > found.verdict.step_time_ns - 3 * MS  # type: ignore[operator]
        assert found.step_time_without_all_ns < found.verdict.step_time_ns - 16 * MS  # type: ignore[operator]

    def test_ranks_of_a_host_that_are_unlike_stand_alone(self, open_run: OpenRun) -> None:
        scenario = replace(HEALTHY, ranks=6, ranks_per_host=2)
        found = stragglers(open_run(faulty(delayed(2, "data", 40), delayed(3, "forward", 10), scenario=scenario)))
        assert [(one.rank, one.cause, one.host) for one in found.named] == [(2, "data", None), (3, "forward", None)]


class TestTransfer:
    """Nobody is late, and the transfer takes longer."""

    @pytest.mark.parametrize(
        ("first", "end", "kind"), [(70, None, "onset"), (40, 80, "transient"), (0, 60, "transient")]
    )
    def test_slow_for_a_while(self, open_run: OpenRun, first: int, end: int | None, kind: str) -> None:
        slow = Fault(rank=0, cause="collective", delay_ns=6 * MS, first_step=first, end_step=end)
        found = stragglers(open_run(faulty(slow)))
        verdict: Any = found.verdict
        assert (found.named, found.step_time_without_all_ns) == ((), None)
        assert (verdict.kind, verdict.cause, verdict.rank, verdict.ranks) == (kind, "collective", None, ())
        assert (verdict.first_step, verdict.last_step) == (max(first, 2), (end or 120) - 1)
        assert verdict.delay_low_ns < 6 * MS < verdict.delay_high_ns
        assert verdict.lost_seconds == pytest.approx(6e-3 * verdict.affected_steps, rel=0.05)
        assert verdict.reason.startswith("No rank is late, but ")

    def test_what_hides_behind_the_backward_costs_nothing(self, open_run: OpenRun) -> None:
        slow = Fault(rank=0, cause="collective", delay_ns=1 * MS, first_step=60, bucket=2)
        assert judge(open_run(faulty(slow))).kind == "none"

    def test_a_late_rank_comes_first(self, open_run: OpenRun) -> None:
        slow = Fault(rank=0, cause="collective", delay_ns=6 * MS, first_step=60)
        verdict = judge(open_run(faulty(slow, delayed(3, "data"))))
        assert (verdict.kind, verdict.rank, verdict.cause) == ("persistent", 3, "data")

    @pytest.mark.parametrize("seed", range(6))
    def test_noise_of_the_network_is_nobody_s(self, open_run: OpenRun, seed: int) -> None:
        assert judge(open_run(replace(HEALTHY, transfer_noise=0.3, seed=seed))).kind == "none"


def assert_cost(verdict: Any, healthy: Run) -> None:
    """What the verdict says would be gained is what the same run without the fault takes less."""
    assert verdict.step_time_without_ns == pytest.approx(judge(healthy).step_time_ns, rel=0.01)
    assert verdict.lost_seconds == pytest.approx(
        (verdict.step_time_ns - verdict.step_time_without_ns) * verdict.steps / 1e9
    )
