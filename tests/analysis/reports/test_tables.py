"""The reports as CSV and Markdown."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator

from tests.analysis.reports.made import parse

from ddpan.analysis import Summary
from ddpan.analysis.reports import REPORTS
from ddpan.analysis.reports.csv import COLUMNS


class TestCsv:
    def rows(self, summary: Summary) -> Iterator[dict[str, str]]:
        return csv.DictReader(io.StringIO(REPORTS["csv"](summary)))

    def test_is_rectangular(self, summary: Summary) -> None:
        lines = list(csv.reader(io.StringIO(REPORTS["csv"](summary))))
        assert tuple(lines[0]) == COLUMNS
        assert {len(line) for line in lines} == {len(COLUMNS)}

    def test_no_place_is_filled_twice(self, summary: Summary) -> None:
        places = [tuple(row[name] for name in COLUMNS[:-1]) for row in self.rows(summary)]
        assert len(places) == len(set(places))

    def test_values_are_those_of_the_results(self, summaries: dict[str, Summary]) -> None:
        summary = summaries["slow"]
        found = {
            int(row["rank"]): float(row["value"])
            for row in self.rows(summary)
            if (row["table"], row["item"], row["metric"]) == ("statistics_by_rank", "forward", "variance_ns2")
        }
        expected = summary.statistics.per_rank.filter(window="forward").select("rank", "variance_ns2")
        assert found == dict(expected.iter_rows())

    def test_holds_every_number_of_the_json(self, summaries: dict[str, Summary]) -> None:
        report = parse(summaries["hostile"])
        values = [row["value"] for row in self.rows(summaries["hostile"])]
        wanted = [
            value
            for table in ("statistics_by_rank", "overlap_by_rank", "ranks", "buckets", "gaps", "step_split")
            for row in report[table]
            for key, value in row.items()
            if key.endswith("_ns") and value is not None
        ]
        assert len(wanted) > 100
        assert {str(value) for value in wanted} <= set(values)


class TestMarkdown:
    def test_tables_are_well_formed(self, summary: Summary) -> None:
        blocks = [block for block in REPORTS["markdown"](summary).split("\n\n") if block.startswith("|")]
        for block in blocks:
            columns = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
            assert len(columns) == 1
            assert re.fullmatch(r"\|( (:--|--:) \|)+", block.splitlines()[1])

    def test_names_are_no_marks(self, summaries: dict[str, Summary]) -> None:
        text = REPORTS["markdown"](summaries["hostile"])
        assert r"?\[31mgpu\|1\`\<b\>?" in text

    def test_begins_with_the_answer(self, summaries: dict[str, Summary]) -> None:
        assert REPORTS["markdown"](summaries["slow"]).startswith("**Rank 2 (on host-000) is slow in loading its data:")
