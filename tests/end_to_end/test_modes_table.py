"""The table of modes is made from what pytest reports."""

from __future__ import annotations

import pytest

from .write_modes_table import read_report, render, rows_of_table


def case(test: str, mode: str, inside: str = "") -> str:
    return f'<testcase name="{test}[{mode}]">{inside}</testcase>'


def facts(tap: str, torch: str, buckets: int) -> str:
    told = {"tap": tap, "torch": torch, "forwards": 18, "backwards": 12, "buckets": buckets}
    inside = "".join(f'<property name="{name}" value="{value}"/>' for name, value in told.items())
    return f"<properties>{inside}</properties>"


def report(*cases: str) -> str:
    return f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"


@pytest.fixture
def table() -> str:
    """What the page says after tests with two torches."""
    old = report(
        case("test_unchanged", "plain"),
        case("test_rows", "plain", facts("reducer_group", "2.13.0", 36)),
        case("test_rows", "new option", '<skipped message="not in this torch: batched_grad_copy"/>'),
        case("test_unchanged", "broken", "<failure>1 != 2</failure>"),
        case("test_rows", "broken", facts("reducer_group", "2.13.0", 36)),
        case("test_rows", "elsewhere", '<skipped message="no network"/>'),
        '<testcase name="test_of_no_mode"/>',
    )
    new = report(
        case("test_rows", "plain", facts("process_group_hooks", "2.14.1", 37)),
        case("test_rows", "new option", facts("process_group_hooks", "2.14.1", 38)),
        case("test_rows", "broken", "<error>no process</error>"),
    )
    return render([read_report(old), read_report(new)])


def test_columns_are_the_taps(table: str) -> None:
    assert table.splitlines()[0] == "| mode | group of the reducer, torch 2.13.0 | process-group hooks, torch 2.14.1 |"


def test_a_mode_is_unchanged_only_if_it_was_tried_and_nothing_failed(table: str) -> None:
    unchanged = "unchanged: 18 forwards, 12 backwards, {} buckets"
    assert rows_of_table(f"text\n<!-- modes: begin -->\n{table}<!-- modes: end -->\nmore") == {
        "plain": [unchanged.format(36), unchanged.format(37)],
        "new option": ["not in this torch", unchanged.format(38)],
        "broken": ["**failed**", "**failed**"],
        "elsewhere": ["not tried", "not tried"],
    }
