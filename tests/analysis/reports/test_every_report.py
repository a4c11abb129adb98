"""Whatever the run, each report renders, says nothing wrong, and loses nothing on the way."""

from __future__ import annotations

import re

import pytest

from ddpan.analysis import Summary
from ddpan.analysis.reports import REPORTS


@pytest.mark.parametrize("form", REPORTS)
class TestEveryReport:
    def test_is_text_that_ends_with_a_line(self, summary: Summary, form: str) -> None:
        text = REPORTS[form](summary)
        assert text.endswith("\n")
        assert text.strip()

    def test_shows_no_value_that_is_none(self, summary: Summary, form: str) -> None:
        assert not re.search(r"\b(nan|inf|NaN|Infinity|None)\b", REPORTS[form](summary))

    def test_moves_no_cursor(self, summary: Summary, form: str) -> None:
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", REPORTS[form](summary))

    def test_is_the_same_each_time(self, summary: Summary, form: str) -> None:
        assert REPORTS[form](summary) == REPORTS[form](summary)

    def test_names_the_slow_rank_and_its_cause(self, summaries: dict[str, Summary], form: str) -> None:
        text = REPORTS[form](summaries["slow"])
        assert re.search(r"\bRank 2\b", text) or "verdict,,,,,,rank,2\n" in text
        assert re.search(r"loading its data|cause,data", text)
