"""Patterns of lateness: who is named, for which steps, on noise and faults of known processes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.analysis.noise_processes import STEP_NS, arrivals

from ddpan.analysis.measures._evidence import SIGNIFICANCE, weigh
from ddpan.analysis.measures._pattern import Pattern, find_pattern, is_rotating


def named(arrival_ns: npt.NDArray[Any]) -> dict[int, Pattern]:
    evidence = weigh(arrival_ns, STEP_NS, comparisons=arrival_ns.shape[1])
    patterns = {int(r): find_pattern(evidence, int(r)) for r in np.flatnonzero(evidence.p_values < SIGNIFICANCE)}
    return {rank: pattern for rank, pattern in patterns.items() if pattern is not None}


class TestPatterns:
    def test_healthy_runs_name_nobody(self) -> None:
        shapes = [(20, 2), (30, 3), (60, 4), (150, 8), (400, 16), (50, 64)]
        settings = itertools.product(shapes, (0.0, 0.3, 0.6, 0.8), ("normal", "t3", "skewed", "spikes"))
        false = [n for n, (shape, rho, tail) in enumerate(settings) if named(arrivals(n, shape, rho, tail, 0.05))]
        assert len(false) <= 1  # of 96

    @pytest.mark.parametrize("ranks", [2, 3, 4, 16, 64])
    @pytest.mark.parametrize("tail", ["normal", "t3", "skewed", "spikes"])
    def test_a_steady_delay(self, ranks: int, tail: str) -> None:
        arrival = arrivals(ranks, (400, ranks), tail=tail)
        arrival[:, 1] += 0.06 * STEP_NS
        found = named(arrival)
        assert list(found) == [1]
        assert found[1].kind == "persistent"
        assert found[1].delay_ns == pytest.approx(0.06 * STEP_NS, rel=0.15)

    def test_the_interval_covers_the_delay(self) -> None:
        covered = []
        for seed in range(120):
            arrival = arrivals(seed, (100, 2 + seed % 5), tail=("normal", "t3", "skewed", "spikes")[seed % 4])
            arrival[:, 0] += 0.1 * STEP_NS
            pattern = named(arrival)[0]
            covered.append(pattern.low_ns <= 0.1 * STEP_NS <= pattern.high_ns)
        assert np.mean(covered) >= 0.90  # 95 % within three standard errors

    def test_steps_far_from_each_other_have_forgotten_more(self) -> None:
        """The interval of a delay now and then needs no blocks as long as those of neighbouring steps."""
        widths = []
        for seed in range(6):
            arrival = arrivals(seed, (600, 4), rho=0.8, tail="normal", sigma=0.01)
            arrival[::12, 0] += 0.2 * STEP_NS
            evidence = weigh(arrival, STEP_NS, comparisons=4)
            assert evidence.correlation > 4
            interval = evidence.estimate(arrival, np.array([0]), np.arange(600) % 12 == 0)
            widths.append(float(interval.high[0] - interval.low[0]))
        # Fifty independent differences of ranks: twice two standard errors are 0.7 % of a step.
        assert max(widths) < 0.02 * STEP_NS

    def test_a_delay_below_a_hundredth_of_the_step_is_not_named(self) -> None:
        arrival = arrivals(5, (500, 4), rho=0.0, tail="normal", sigma=0.002)
        arrival[:, 2] += 0.008 * STEP_NS
        evidence = weigh(arrival, STEP_NS, comparisons=4)
        assert evidence.p_values[2] < 1e-6
        assert named(arrival) == {}

    def test_a_rank_as_far_off_as_others_are_is_not_named(self) -> None:
        # The ranks differ lastingly, by up to 4 % of the step; the last of them is no outlier.
        arrival = arrivals(5, (500, 8), rho=0.0, tail="normal", sigma=0.002)
        arrival += np.linspace(-0.02, 0.02, 8) * STEP_NS
        assert named(arrival) == {}

    @pytest.mark.parametrize(
        ("first", "end", "kind"), [(130, 300, "onset"), (90, 170, "transient"), (0, 80, "transient")]
    )
    @pytest.mark.parametrize("ranks", [2, 4, 16])
    def test_a_stretch(self, ranks: int, first: int, end: int, kind: str) -> None:
        arrival = arrivals(first + ranks, (300, ranks))
        arrival[first:end, 0] += 0.15 * STEP_NS
        found = named(arrival)
        assert list(found) == [0]
        assert found[0].kind == kind
        affected = np.flatnonzero(found[0].affected)
        assert (affected[0], affected[-1] + 1) == pytest.approx((first, end), abs=4)
        assert found[0].delay_ns == pytest.approx(0.15 * STEP_NS, rel=0.1)

    @pytest.mark.parametrize("ranks", [2, 4, 16])
    def test_now_and_then(self, ranks: int) -> None:
        arrival = arrivals(ranks, (300, ranks), sigma=0.01)
        late = np.random.default_rng(1).random(300) < 0.2
        arrival[late, 1] += 0.2 * STEP_NS
        found = named(arrival)
        assert list(found) == [1]
        assert found[1].kind == "intermittent"
        assert np.mean(found[1].affected == late) > 0.98
        assert found[1].delay_ns == pytest.approx(0.2 * STEP_NS, rel=0.1)

    def test_now_and_then_among_heavy_tails(self) -> None:
        """On every rank noise passes the limit as often as the delay does, but never by as much."""
        arrival = arrivals(2, (300, 6), rho=0.0, tail="spikes", sigma=0.004)
        arrival[np.random.default_rng(1).random(300) < 0.06, 3] += 0.35 * STEP_NS
        evidence = weigh(arrival, STEP_NS, comparisons=6)
        assert np.delete(evidence.late.sum(axis=0), 3).min() > 5
        found = named(arrival)
        assert {rank: pattern.kind for rank, pattern in found.items()} == {3: "intermittent"}
        assert found[3].low_ns < 0.35 * STEP_NS < found[3].high_ns

    def test_a_rank_late_a_little_more_often_than_all_others_is_not_named(self) -> None:
        arrival = arrivals(3, (3000, 8), sigma=0.01)
        shares = np.array([0.2, *[0.14] * 7])
        arrival[np.random.default_rng(1).random(arrival.shape) < shares] += 0.2 * STEP_NS
        assert weigh(arrival, STEP_NS, comparisons=8).late_p_values[0] < 1e-4
        assert named(arrival) == {}

    @pytest.mark.parametrize("ranks", [3, 4, 8, 64])
    def test_in_turn(self, ranks: int) -> None:
        arrival = arrivals(ranks, (200, ranks), tail="normal", sigma=0.01)
        arrival[np.arange(200), np.random.default_rng(1).integers(ranks, size=200)] += 0.2 * STEP_NS
        assert named(arrival) == {}
        assert is_rotating(weigh(arrival, STEP_NS, comparisons=ranks))

    def test_one_rank_alone_is_not_in_turn(self) -> None:
        arrival = arrivals(5, (200, 6), tail="normal", sigma=0.01)
        arrival[:120, 2] += 0.2 * STEP_NS
        assert not is_rotating(weigh(arrival, STEP_NS, comparisons=6))

    def test_seldom_late_steps_that_cost_little_but_cannot_be_chance(self) -> None:
        arrival = arrivals(6, (900, 12), rho=0.0, tail="normal", sigma=0.01)
        late = np.random.default_rng(1).random(900) < 0.06
        arrival[late, 7] += 0.08 * STEP_NS
        found = named(arrival)
        assert {rank: pattern.kind for rank, pattern in found.items()} == {7: "intermittent"}
        assert found[7].low_ns < 0.08 * STEP_NS < found[7].high_ns

    def test_few_late_steps_have_an_interval(self) -> None:
        covered = []
        for seed in range(40):
            arrival = arrivals(seed, (60, 12), rho=0.0, tail="normal", sigma=0.01)
            arrival[5:60:11, 3] += 0.3 * STEP_NS
            found = named(arrival)
            assert {rank: pattern.kind for rank, pattern in found.items()} == {3: "intermittent"}
            covered.append(found[3].low_ns < 0.3 * STEP_NS < found[3].high_ns)
        assert np.mean(covered) >= 0.85

    def test_scattered_late_steps_are_no_stretch(self) -> None:
        arrival = arrivals(8, (500, 12), rho=0.0, tail="normal", sigma=0.004)
        arrival[[*range(100, 112), *range(130, 480, 35)], 3] += 0.14 * STEP_NS
        assert {rank: pattern.kind for rank, pattern in named(arrival).items()} == {3: "intermittent"}

    @pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
    @pytest.mark.parametrize("tail", ["normal", "t3", "skewed"])
    def test_healthy_ranks_do_not_rotate(self, ranks: int, tail: str) -> None:
        assert not is_rotating(weigh(arrivals(ranks, (200, ranks), tail=tail), STEP_NS, comparisons=ranks))

    def test_two_slow_ranks(self) -> None:
        arrival = arrivals(9, (200, 6))
        arrival[:, [1, 4]] += 0.1 * STEP_NS
        assert sorted(named(arrival)) == [1, 4]

    def test_slow_drift_of_all_ranks_together_is_nobody_s(self) -> None:
        arrival = arrivals(10, (200, 4)) + np.linspace(0, STEP_NS, 200)[:, None]
        assert named(arrival) == {}

    def test_steps_needed_grow_with_correlation(self) -> None:
        white = weigh(arrivals(1, (40, 2), rho=0.0), STEP_NS, comparisons=2)
        slow = weigh(arrivals(1, (40, 2), rho=0.95), STEP_NS, comparisons=2)
        assert white.steps_needed() <= 40 < slow.steps_needed()
