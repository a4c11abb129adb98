"""The report for scripts: every key and column is documented, and every value is a result's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.analysis.reports.made import parse

from ddpan.analysis import Summary
from ddpan.analysis.reports._answer import answer

DOCUMENTATION = (Path(__file__).parents[3] / "docs" / "json.md").read_text()


def documented(title: str) -> set[str]:
    """The keys in the table below a heading of docs/json.md."""
    _, _, rest = DOCUMENTATION.partition(f"\n## {title}\n")
    assert rest, f"docs/json.md has no section {title!r}"
    rows = re.findall(r"^\| (`.*?) \|", rest.partition("\n## ")[0], re.MULTILINE)
    return {key for row in rows for key in re.findall(r"`(\w+)`", row)}


NO_TABLES = {"run", "verdict", "answer", "overlap_reason", "changes_reason"}


class TestJson:
    def test_every_key_is_documented_and_no_other(self, summary: Summary) -> None:
        report = parse(summary)
        assert report.keys() == documented("The object")
        for title in ("verdict", "run"):
            assert report[title].keys() == documented(title)

    @pytest.mark.parametrize("table", sorted(documented("The object") - NO_TABLES))
    def test_every_column_is_documented_and_no_other(self, summaries: dict[str, Summary], table: str) -> None:
        if table.endswith("_version"):
            return
        rows = parse(summaries["hostile"])[table]
        base = re.sub(r"_by_rank|_of_warmup", "", table).replace("named", "verdict")
        keys = documented(base)
        assert rows
        for row in rows:
            assert row.keys() | ({"rank"} & keys) == keys
            assert ("rank" in row) == (
                "rank" in keys and table not in {"statistics", "overlap", "statistics_of_warmup"}
            )

    def test_version_is_the_documented_one(self, summaries: dict[str, Summary]) -> None:
        assert f"`schema_version` is {parse(summaries['slow'])['schema_version']}." in DOCUMENTATION

    def test_values_are_those_of_the_results(self, summaries: dict[str, Summary]) -> None:
        summary = summaries["slow"]
        report = parse(summary)
        assert report["ranks"] == summary.stragglers.ranks.to_dicts()
        assert report["statistics_by_rank"] == summary.statistics.per_rank.to_dicts()
        assert report["verdict"]["delay_ns"] == summary.stragglers.verdict.delay_ns
        assert (report["verdict"]["rank"], report["verdict"]["cause"]) == (2, "data")
        assert report["run"]["hosts"] == {"host-000": [0, 1, 2, 3]}
        assert report["answer"] == list(answer(summary))

    def test_values_that_are_not_finite_are_null(self, summaries: dict[str, Summary]) -> None:
        for row in parse(summaries["not finite"])["ranks"]:
            assert (row["delay_ns"], row["wait_ns"]) == (None, None)
