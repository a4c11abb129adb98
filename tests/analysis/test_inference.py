"""The statistics behind the verdict, against scipy.stats, brute force and known processes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats
from tests.analysis.noise_processes import autoregressive

from ddpan.analysis.measures._evidence import late_p_values
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
from ddpan.analysis.measures._stretch import change_p_values, exceedance_p_values, find_stretches, refine


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
