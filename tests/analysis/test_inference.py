"""The statistics behind the verdict, against scipy.stats, brute force and known processes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from ddpan.analysis.measures._evidence import SIGNIFICANCE, late_p_values, weigh
from ddpan.analysis.measures._inference import (
    block_edges,
    block_medians,
    correlation_steps,
    excess_over_others,
    mean_interval,
    median,
    place_p_values,
    row_means,
    total_p_values,
)
from ddpan.analysis.measures._noise import noise_of, quiet_noises, without_levels
from ddpan.analysis.measures._pattern import Pattern, find_pattern, is_rotating
from ddpan.analysis.measures._stretch import change_p_values, exceedance_p_values, find_stretches, refine

STEP_NS = 100e6


def autoregressive(random: np.random.Generator, shape: tuple[int, int], rho: float, tail: str) -> npt.NDArray[Any]:
    """AR(1) noise with a spread of about 1; innovations normal, Student's t with 3 degrees, skewed, or with spikes."""
    size = (shape[0] + 200, shape[1])
    innovations = {
        "normal": lambda: random.standard_normal(size),
        "t3": lambda: random.standard_t(3, size),
        "skewed": lambda: random.lognormal(0, 0.8, size) - 1,
        "spikes": lambda: random.standard_normal(size) + (random.random(size) < 0.03) * random.exponential(15, size),
    }[tail]()
    noise = np.zeros(size)
    for step in range(1, len(noise)):
        noise[step] = rho * noise[step - 1] + np.sqrt(1 - rho**2) * innovations[step]
    return noise[200:]


def arrivals(seed: int, shape: tuple[int, int], rho: float = 0.3, tail: str = "t3", sigma: float = 0.02) -> Any:
    noise = autoregressive(np.random.default_rng(seed), shape, rho, tail)
    return STEP_NS * (0.7 + sigma * noise)


def named(arrival_ns: npt.NDArray[Any]) -> dict[int, Pattern]:
    evidence = weigh(arrival_ns, STEP_NS, comparisons=arrival_ns.shape[1])
    patterns = {int(r): find_pattern(evidence, int(r)) for r in np.flatnonzero(evidence.p_values < SIGNIFICANCE)}
    return {rank: pattern for rank, pattern in patterns.items() if pattern is not None}


class TestBuildingBlocks:
    @pytest.mark.parametrize("shape", [(1, 1), (4, 2), (5, 3), (7, 64)])
    @pytest.mark.parametrize("axis", [0, 1])
    def test_median_is_nanmedian(self, shape: tuple[int, int], axis: int) -> None:
        values = np.random.default_rng(1).normal(size=shape)
        values[np.random.default_rng(2).random(shape) < 0.2] = np.nan
        values[0, 0] = 1.0
        known = ~np.isnan(values).all(axis=axis)
        expected = np.nanmedian(values.compress(known, axis=1 - axis), axis=axis)
        assert median(values, axis)[known] == pytest.approx(expected)
        assert np.isnan(median(values, axis)[~known]).all()

    def test_median_of_nothing_is_unknown(self) -> None:
        assert np.isnan(median(np.zeros((0, 3)))).tolist() == [True] * 3

    @pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 9])
    def test_excess_is_over_the_median_of_the_others(self, ranks: int) -> None:
        values = np.random.default_rng(ranks).integers(0, 6, (50, ranks)).astype(float)  # with ties
        expected = [[row[r] - np.median(np.delete(row, r)) for r in range(ranks)] for row in values]
        assert excess_over_others(values) == pytest.approx(np.array(expected))

    def test_excess_with_missing_values(self) -> None:
        nan = np.nan
        values = np.array([[1, 2, nan, 9], [nan, nan, 3, 4], [nan, nan, nan, 5], [1, 2, 3, 4]], float)
        expected = [[-4.5, -3, nan, 7.5], [nan, nan, -1, 1], [nan] * 4, [-2, -1, 1, 2]]
        assert excess_over_others(values) == pytest.approx(np.array(expected), nan_ok=True)

    def test_row_means(self) -> None:
        assert row_means(np.array([[1, np.nan], [np.nan, np.nan], [1, 2]])) == pytest.approx(
            [1, np.nan, 1.5], nan_ok=True
        )

    @pytest.mark.parametrize(("rho", "steps_per_independent"), [(0.0, 1), (0.5, 3), (0.8, 9)])
    @pytest.mark.parametrize("tail", ["normal", "t3"])
    def test_correlation_of_an_autoregressive_process(
        self, rho: float, steps_per_independent: float, tail: str
    ) -> None:
        # The integrated autocorrelation time of AR(1) is (1 + rho) / (1 - rho).
        noise = autoregressive(np.random.default_rng(7), (3000, 8), rho, tail)
        assert correlation_steps(noise) == pytest.approx(steps_per_independent, rel=0.15)

    def test_correlation_with_missing_values(self) -> None:
        noise = autoregressive(np.random.default_rng(7), (3000, 8), 0.5, "normal")
        noise[np.random.default_rng(8).random(noise.shape) < 0.3] = np.nan
        assert correlation_steps(noise) == pytest.approx(3, rel=0.2)

    def test_correlation_of_a_constant_is_one(self) -> None:
        assert correlation_steps(np.zeros((50, 4))) == 1.0

    def test_blocks_cover_all_steps_and_are_long_enough(self) -> None:
        edges = block_edges(103, 4.2, most=64)
        assert (edges[0], edges[-1]) == (0, 103)
        assert np.diff(edges).min() >= 9
        assert len(block_edges(10_000, 1.0, most=64)) == 65
        values = np.arange(103.0)[:, None]
        assert block_medians(values, edges)[0, 0] == np.median(values[: edges[1]])

    def test_mean_interval_is_scipy_s(self) -> None:
        blocks = np.random.default_rng(0).normal(5, 2, (12, 3))
        found = mean_interval(blocks)
        for column in range(3):
            expected = stats.ttest_1samp(blocks[:, column], 0).confidence_interval(0.95)
            assert (found.low[column], found.high[column]) == pytest.approx((expected.low, expected.high))
        assert np.isnan(mean_interval(blocks[:1]).low).all()

    def test_the_choice_of_references_widens_the_interval(self) -> None:
        # Eight references out of 32: a variance of 3/4 of s^2 / 8, on top of that of the blocks, by Welch's formula.
        blocks = np.random.default_rng(0).normal(5, 2, (12, 1))
        chosen = np.random.default_rng(1).normal(5, 3, (1, 8))
        within, between = blocks.var(ddof=1) / 12, 0.75 * chosen.var(ddof=1) / 8
        freedom = (within + between) ** 2 / (within**2 / 11 + between**2 / 7)
        half = stats.t.ppf(0.975, freedom) * np.sqrt(within + between)
        found = mean_interval(blocks, chosen=chosen, unseen=np.array([0.75]))
        assert found.high[0] - found.middle[0] == pytest.approx(half)
        whole = mean_interval(blocks, chosen=chosen, unseen=np.array([0.0]))
        assert whole.low == pytest.approx(mean_interval(blocks).low)


class TestPValues:
    @pytest.mark.parametrize(("blocks", "ranks"), [(5, 3), (4, 4), (8, 2), (3, 6)])
    def test_places_are_conservative_at_the_extreme(self, blocks: int, ranks: int) -> None:
        always_last = np.tile(np.arange(float(ranks)), (blocks, 1))
        exact = ranks**-blocks
        assert exact <= place_p_values(always_last)[-1] < max(20 * exact, 0.02)

    def test_places_against_enumeration(self) -> None:
        # All ways in which one of three ranks can be placed in four blocks.
        sums = np.array([sum(places) for places in itertools.product((1, 2, 3), repeat=4)])
        for total in (9, 10, 11):
            places = {9: (3, 2, 2, 2), 10: (3, 3, 2, 2), 11: (3, 3, 3, 2)}[total]
            blocks = np.array([{3: (0, 1, 2), 2: (0, 2, 1)}[place] for place in places], float)
            assert place_p_values(blocks)[2] == pytest.approx((sums >= total).mean(), abs=0.015)

    def test_missing_ranks_do_not_take_part_in_a_block(self) -> None:
        blocks = np.tile([0.0, 1.0, 2.0, np.nan], (10, 1))
        assert place_p_values(blocks)[:3] == pytest.approx(place_p_values(blocks[:, :3]))
        assert place_p_values(blocks)[3] == 1.0

    def test_totals_against_enumeration(self) -> None:
        # Each block's counts fall to three ranks in each order alike.
        blocks = [(0, 0, 1), (0, 1, 2), (0, 0, 3), (1, 1, 2), (0, 0, 1)]
        totals = np.array([sum(one) for one in itertools.product(*blocks)])
        for total in (5, 7, 8, 9):
            first = next(one for one in itertools.product(*blocks) if sum(one) == total)
            others = [
                sorted(block)[: block.index(got)] + sorted(block)[block.index(got) + 1 :]
                for block, got in zip(blocks, first, strict=True)
            ]
            counts = np.array([[got, *rest] for got, rest in zip(first, others, strict=True)])
            exact = (totals >= total).mean()
            assert total_p_values(counts)[0] == pytest.approx(exact)

    def test_totals_at_the_extreme_are_exact(self) -> None:
        always = np.tile([1, 0], (12, 1))
        assert total_p_values(always) == pytest.approx([2**-12, 1.0], rel=1e-6)
        assert total_p_values(np.zeros((5, 3), np.intp)).tolist() == [1.0, 1.0, 1.0]

    def test_late_steps_are_counted_by_block(self) -> None:
        late = np.zeros((40, 4), np.bool_)
        late[::4, 0] = late[1::8, 1] = True
        edges = np.arange(0, 41, 4)
        counts = np.column_stack([np.ones(10), np.tile([1, 0], 5), np.zeros((10, 2))]).astype(np.intp)
        assert late_p_values(late, edges) == pytest.approx(total_p_values(counts))

    def test_change_is_student_s_test_times_the_number_of_stretches(self) -> None:
        column = np.random.default_rng(3).normal(size=20)
        column[5:12] += 2
        found = find_stretches(column[:, None], shortest=3)
        assert found is not None
        first, end = int(found.first[0]), int(found.end[0])
        inside, outside = column[first:end], np.delete(column, np.s_[first:end])
        single = stats.ttest_ind(inside, outside, alternative="greater").pvalue
        assert found.candidates == sum(1 for i in range(20) for j in range(i + 3, 21) if 20 - (j - i) >= 3)
        assert change_p_values(20, found)[0] == pytest.approx(single * found.candidates)

    def test_exceedance_is_a_binomial_of_t_tails(self) -> None:
        rows = np.column_stack([np.array([5.0, 6, 7, 8, 1, 9, 6, 5]), np.full(8, -1.0)])
        chance = stats.t.sf(5.0, 3)  # the third smallest of eight is 5, so six reach it
        expected = stats.binom.sf(5, 8, chance)
        assert exceedance_p_values(rows, np.ones(2), None)[0] == pytest.approx(expected)

    def test_exceedance_counts_what_other_ranks_do(self) -> None:
        rows = np.column_stack([np.full(8, 5.0), np.array([9.0, 9, 9, 9, 0, 0, 0, 0])])
        assert exceedance_p_values(rows, np.ones(2), None)[0] == pytest.approx(stats.binom.sf(5, 8, 0.5))


class TestStretches:
    def test_the_best_stretch_is_the_raised_one(self) -> None:
        rows = np.zeros((20, 3))
        rows[6:11, 0] = 1.0
        rows[14:, 1] = 1.0
        rows[:5, 2] = 1.0
        found = find_stretches(rows, shortest=2)
        assert found is not None
        assert list(zip(found.first.tolist(), found.end.tolist(), strict=True)) == [(6, 11), (14, 20), (0, 5)]
        assert found.explained == pytest.approx([1, 1, 1])

    def test_too_few_rows(self) -> None:
        assert find_stretches(np.zeros((5, 2)), shortest=3) is None

    def test_ends_are_refined_to_the_step(self) -> None:
        values = np.zeros(60)
        values[17:43] = 1.0
        assert refine(values, 15, 40, 5) == (17, 43)
        assert refine(values[:43], 15, 43, 5) == (17, 43)


class TestNoise:
    @pytest.mark.parametrize("tail", ["normal", "t3"])
    @pytest.mark.parametrize("delay", [2.0, 30.0])
    def test_a_delay_in_a_stretch_is_no_correlation(self, delay: float, tail: str) -> None:
        values = autoregressive(np.random.default_rng(2), (300, 3), 0.0, tail)
        values[100:220, 1] += delay
        assert correlation_steps(without_levels(values)) < 1.4
        assert correlation_steps(values) > 5

    @pytest.mark.parametrize("tail", ["normal", "t3"])
    def test_slow_noise_stays(self, tail: str) -> None:
        values = autoregressive(np.random.default_rng(3), (600, 8), 0.9, tail)
        assert correlation_steps(without_levels(values)) == pytest.approx(19, rel=0.3)

    @pytest.mark.parametrize("ranks", [2, 3, 4])
    def test_a_rank_that_changes_moves_the_reference_of_few_others(self, ranks: int) -> None:
        values = autoregressive(np.random.default_rng(6), (240, ranks), 0.5, "normal")
        values[100:, 1] += 12
        residuals = noise_of(values)
        assert correlation_steps(residuals) == pytest.approx(3, rel=0.4)
        assert 1.4826 * np.median(np.abs(residuals), axis=0) == pytest.approx([1.3] * ranks, rel=0.25)

    def test_late_steps_that_crowd_are_no_noise(self) -> None:
        values = np.random.default_rng(7).normal(0, 1, (200, 6))
        values[:150, 2] += 15 * (np.random.default_rng(8).random(150) < 0.55)
        levelled = values - np.median(values, axis=0)
        levelled[:150, 2] -= 15  # as if they were one stretch
        assert quiet_noises(values, levelled)[2] < 1.5

    def test_noise_beside_late_steps(self) -> None:
        values = np.random.default_rng(4).normal(0, 2, (2000, 4))
        noisy = values.copy()
        noisy[np.random.default_rng(5).random(2000) < 0.3, 2] += 30
        assert quiet_noises(noisy, noisy - np.median(noisy, axis=0)) == pytest.approx([2.0] * 4, rel=0.35)
        values[:, 1] *= 5
        assert quiet_noises(values, values)[1] == pytest.approx(10 / 1.3, rel=0.15)


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
