"""The anchor between monotonic and wall clock."""

from __future__ import annotations

import time
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from ddpan.collector.clock import Anchor, now_ns


def test_tightest_reading_is_kept() -> None:
    monotonic = iter([0, 1000, 2000, 2100, 3000, 9000])
    wall = iter([500_000, 502_050, 506_000])
    anchor = Anchor.take(monotonic=lambda: next(monotonic), wall=lambda: next(wall), tries=3)
    assert anchor == Anchor(monotonic_ns=2050, epoch_ns=502_050, uncertainty_ns=50)
    assert anchor.offset_ns == 500_000


delays = st.integers(0, 10**7)


@given(st.integers(0, 2**60), st.integers(-(10**18), 2 * 10**18), st.lists(delays, min_size=10, max_size=10))
def test_true_offset_lies_within_the_uncertainty(begin: int, offset: int, pauses: list[int]) -> None:
    """Each reading of a clock takes an arbitrary time; the wall clock is ``offset`` ahead of the monotonic one."""
    steps: Iterator[int] = iter(pauses * 2)
    now = begin

    def monotonic() -> int:
        nonlocal now
        now += next(steps, 5)
        return now

    anchor = Anchor.take(monotonic=monotonic, wall=lambda: monotonic() + offset)
    assert abs(anchor.offset_ns - offset) <= anchor.uncertainty_ns


def test_real_clocks() -> None:
    anchor = Anchor.take()
    assert 0 <= anchor.uncertainty_ns < 10_000_000
    assert abs(now_ns() + anchor.offset_ns - time.time_ns()) < 100_000_000


def test_metadata() -> None:
    assert Anchor(monotonic_ns=5, epoch_ns=105, uncertainty_ns=2).as_metadata() == {
        "anchor_monotonic_ns": 5,
        "anchor_epoch_ns": 105,
        "uncertainty_ns": 2,
    }
