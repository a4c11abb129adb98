"""Overlap and waiting of single steps, against a count of every nanosecond."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpan.analysis.measures._comparison import communication, compare, exposed_by_bucket

Spans = list[tuple[int, int]]
spans = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 30)).map(lambda s: (s[0], s[0] + s[1])), min_size=1, max_size=5
)


def arrays(of: Spans) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Launch and end of one step and one rank, shape (1, buckets, 1)."""
    launch, end = np.array(of, np.float64).T
    return launch[None, :, None], end[None, :, None]


def counted(of: Spans, begin: int, stop: int) -> tuple[int, int, list[float]]:
    """Communication, its hidden part, and the exposed part of each bucket, nanosecond by nanosecond."""
    comm = hidden = 0
    exposed = [0.0] * len(of)
    for moment in range(80):
        flying = [i for i, (launch, end) in enumerate(of) if launch <= moment < end]
        computing = begin <= moment < stop
        comm += bool(flying)
        hidden += bool(flying) and computing
        for i in flying:
            exposed[i] += 0 if computing else 1 / len(flying)
    return comm, hidden, exposed


@settings(max_examples=200, deadline=None)
@given(of=spans, begin=st.integers(0, 40), length=st.integers(0, 40))
def test_every_nanosecond_is_counted_once(of: Spans, begin: int, length: int) -> None:
    launch, end = arrays(of)
    window = np.array([[float(begin)]]), np.array([[float(begin + length)]])
    comm, hidden, exposed = counted(of, begin, begin + length)
    found = communication(launch, end, *window)
    assert (found.comm.item(), found.hidden.item()) == (comm, hidden)
    assert exposed_by_bucket(launch, end, *window)[0, :, 0] == pytest.approx(exposed)


@settings(max_examples=200, deadline=None)
@given(of=spans, begin=st.integers(0, 40), length=st.integers(0, 40), data=st.data())
def test_what_a_rank_stands_still_for_is_not_hidden(of: Spans, begin: int, length: int, data: Any) -> None:
    """Against a count of every nanosecond in which a bucket is in flight, while the rank computes or stands still."""
    launch, end = arrays(of)
    still = [data.draw(st.integers(first, last)) for first, last in of]
    wait_start = np.array(still, np.float64)[None, :, None]
    window = np.array([[float(begin)]]), np.array([[float(begin + length)]])
    hidden, exposed = 0, [0.0] * len(of)
    for moment in range(80):
        flying = [i for i, (first, last) in enumerate(of) if first <= moment < last]
        stands = any(since <= moment < last for since, (_, last) in zip(still, of, strict=True))
        computing = begin <= moment < begin + length and not stands
        hidden += bool(flying) and computing
        for i in flying:
            exposed[i] += 0 if computing else 1 / len(flying)
    assert communication(launch, end, *window, wait_start).hidden.item() == hidden
    assert exposed_by_bucket(launch, end, *window, wait_start)[0, :, 0] == pytest.approx(exposed)


def test_standing_still_for_a_bucket_does_not_make_the_next_one_late() -> None:
    """Rank 1 comes 20 ns late to the first bucket; rank 0 waits for it there, so both launch the second together."""
    launch = np.array([[[10.0, 30.0], [40.0, 40.0]]])
    end = np.array([[[35.0, 35.0], [50.0, 50.0]]])
    start = np.zeros((1, 2))
    assert compare(launch, end, start).lateness[0].tolist() == [[-10, 10], [0, 0]]
    assert compare(launch, end, start, launch).lateness[0].tolist() == [[-10, 10], [-10, 10]]


@settings(max_examples=100, deadline=None)
@given(of=spans, slack=st.integers(0, 20))
def test_buckets_launched_during_the_computation(of: Spans, slack: int) -> None:
    """The usual case: all launches lie within the backward computation; ends come in any order."""
    stop = max(launch for launch, _ in of) + slack
    launch, end = arrays(of)
    window = np.array([[0.0]]), np.array([[float(stop)]])
    comm, hidden, exposed = counted(of, 0, stop)
    assert exposed_by_bucket(launch, end, *window)[0, :, 0] == pytest.approx(exposed)
    found = communication(launch, end, *window)
    assert found.comm.item() - found.hidden.item() == pytest.approx(sum(exposed)) == comm - hidden


def test_two_overlapping_spans_are_a_union() -> None:
    """CASES: two overlapping gloo spans: the union, not the sum."""
    launch, end = arrays([(0, 10), (5, 20)])
    found = communication(launch, end, np.array([[0.0]]), np.array([[12.0]]))
    assert (found.comm.item(), found.hidden.item()) == (20, 12)


def test_spans_with_a_gap_between_do_not_count_it() -> None:
    launch, end = arrays([(0, 10), (15, 20)])
    found = communication(launch, end, np.array([[0.0]]), np.array([[30.0]]))
    assert (found.comm.item(), found.hidden.item()) == (15, 15)


def one_step(values: list[list[float]]) -> npt.NDArray[np.float64]:
    """Shape (1, buckets, ranks)."""
    return np.array([values])


class TestCompare:
    def test_shortest_collective_is_the_slow_rank(self) -> None:
        """CASES: rank 0 is the late one and everyone else waits: it waits 0, and is named."""
        launch, end = one_step([[30, 10, 12, 11]]), one_step([[34, 34, 34, 35]])
        found = compare(launch, end, np.zeros((1, 4)))
        assert found.transfer.tolist() == [[4]]
        assert found.wait.tolist() == [[[0, 20, 18, 20]]]
        assert found.lateness.tolist() == [[[18.5, -1.5, 0.5, -0.5]]]
        assert found.latest.tolist() == [[[True, False, False, False]]]

    def test_true_straggling_of_four_milliseconds(self) -> None:
        """CASES: 4.00 ms between the first and the last to launch."""
        found = compare(one_step([[0, 4_000_000]]), one_step([[5_000_000, 5_000_000]]), np.zeros((1, 2)))
        assert found.wait.tolist() == [[[4_000_000, 0]]]

    def test_one_unknown_rank_makes_the_collective_unknown_and_no_other(self) -> None:
        launch, end = one_step([[1, np.nan, 3], [4, 5, 6]]), one_step([[7, 7, 7], [8, 8, 8]])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = compare(launch, end, np.zeros((1, 3)))
        assert np.isnan(found.lateness[0, 0]).all()
        assert np.isnan(found.transfer[0]).tolist() == [True, False]
        assert found.latest.tolist() == [[[False, False, False], [False, False, True]]]
        assert found.lateness[0, 1].tolist() == [-1, 0, 1]

    @settings(max_examples=60, deadline=None)
    @given(data=st.data())
    def test_a_clock_that_is_shifted_changes_nothing(self, data: Any) -> None:
        ranks = data.draw(st.integers(1, 6))
        draw = st.lists(st.integers(0, 10**9), min_size=ranks, max_size=ranks)
        launch = one_step([data.draw(draw) for _ in range(2)])
        end, start = launch + 10**9, np.array([data.draw(draw)], np.float64)
        shift = np.array(data.draw(draw), np.float64)
        before, after = compare(launch, end, start), compare(launch + shift, end + shift, start + shift)
        for name, value in vars(before).items():
            assert (value == vars(after)[name]).all()
