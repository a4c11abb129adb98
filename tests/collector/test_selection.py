"""Which steps are recorded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpan.collector.selection import StepSelection

numbers = st.integers(0, 10**6)


@pytest.mark.parametrize(
    ("text", "recorded"),
    [
        ("0:", list(range(12))),
        (":", list(range(12))),
        (":3", [0, 1, 2]),
        ("10:", [10, 11]),
        ("2:5", [2, 3, 4]),
        ("every=5", [0, 1, 5, 6, 10, 11]),
        ("every=1", list(range(12))),
        ("3:10,every=4", [3, 4, 7, 8]),
        ("3:8,every=4", [3, 4, 7]),
    ],
)
def test_steps(text: str, recorded: list[int]) -> None:
    selection = StepSelection.parse(text)
    assert [step for step in range(12) if step in selection] == recorded


@pytest.mark.parametrize(
    "text", ["", "5", "5:5", "6:5", "a:b", "-3:", "every=", "every=0", ":,every", "0:5,7:9", "1:2 "]
)
def test_not_a_selection(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        StepSelection.parse(text)


@given(first=numbers, length=st.none() | st.integers(1, 10**6), every=st.integers(1, 10**4))
def test_text_form_reads_back(first: int, length: int | None, every: int) -> None:
    selection = StepSelection(first=first, stop=None if length is None else first + length, every=every)
    assert StepSelection.parse(str(selection)) == selection


@given(first=numbers, every=st.integers(2, 1000), cycle=st.integers(0, 50))
def test_the_step_before_a_recorded_one_is_known(first: int, every: int, cycle: int) -> None:
    """A step is measured from the end of the one before it, so one of each recorded pair can be."""
    selection = StepSelection(first=first, every=every)
    begin = first + cycle * every
    assert begin in selection
    assert begin + 1 in selection
    assert first - 1 not in selection
