"""The report on a terminal and in a pipe."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from tests.analysis.reports.made import MS, VERDICT, judged

from ddpan.analysis import Summary, find_runs
from ddpan.analysis.reports import console
from ddpan.analysis.reports._answer import answer
from ddpan.analysis.reports.console import Terminal
from ddpan.analysis.testing import Scenario, simulate, write_log


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


class TestText:
    @pytest.mark.parametrize("width", [80, 120])
    def test_fits_the_terminal(self, summary: Summary, width: int) -> None:
        text = console.render(summary, terminal=Terminal(width=width, colour=True))
        assert max(len(line) for line in plain(text).splitlines()) <= width

    def test_terminal_shows_all_that_a_pipe_shows(self, summary: Summary) -> None:
        on_terminal = console.render(summary, terminal=Terminal(width=200, colour=False))
        words = set(console.render(summary).split())
        assert words <= set(on_terminal.split())

    def test_colour_only_where_asked(self, summary: Summary) -> None:
        assert "\x1b[1;3" in console.render(summary, terminal=Terminal(width=80, colour=True))
        assert "\x1b" not in console.render(summary, terminal=Terminal(width=80, colour=False))
        assert "\x1b" not in console.render(summary)

    def test_pipe_gets_plain_lines(self, summary: Summary) -> None:
        text = console.render(summary)
        assert text.splitlines()[: len(answer(summary))] == list(answer(summary))
        assert not re.search(r"[│─…]| $", text, re.MULTILINE)

    def test_sections_stand_in_order(self, summary: Summary) -> None:
        titles = [line for line in console.render(summary).splitlines()[5:] if re.match(r"[A-Z]", line)]
        heads = [
            "Run",
            "Time of a step",
            "Changes during the run",
            "Statistics",
            "Overlap",
            "Ranks",
            "Buckets",
            "Data quality",
        ]
        assert [re.split(r"[ ,]*[(,]", title)[0] for title in titles] == heads[-len(titles) :]

    def test_many_ranks_are_cut_to_the_latest_and_the_median(self, summaries: dict[str, Summary]) -> None:
        text = console.render(summaries["many"])
        table = text.partition("\nRanks")[2].partition("\nBuckets")[0].splitlines()
        assert table[2].split()[0] == "2"
        assert table[10].split()[0] == "median"
        assert table[11] == "  16 more ranks; --format csv or json has all of them."
        delays = [float(line.split()[1]) for line in table[2:10]]
        assert delays == sorted(delays, reverse=True)

    def test_many_buckets_are_cut_to_the_most_exposed(self, summaries: dict[str, Summary]) -> None:
        text = console.render(summaries["many"])
        table = text.partition("\nBuckets")[2].splitlines()
        shown = [int(line.split()[0]) for line in table[2:10]]
        exposed = summaries["many"].stragglers.buckets.sort("exposed_ns", descending=True).head(8)
        assert shown == sorted(exposed["bucket"].to_list())
        assert table[10].startswith("  12 more buckets")

    def test_first_late_bucket_is_among_those_shown(self, summaries: dict[str, Summary]) -> None:
        backward = replace(VERDICT, cause="backward", first_late_bucket=3)
        text = console.render(judged(summaries["many"], backward))
        table = text.partition("\nBuckets")[2].splitlines()
        assert [int(line.split()[0]) for line in table[2:12]][:2] == [2, 3]
        assert table[12].startswith("  10 more buckets")

    def test_each_module_has_its_rows(self, summaries: dict[str, Summary]) -> None:
        found = summaries["many"].stragglers
        second = found.ranks.with_columns(module=pl.lit(1, pl.UInt16))
        both = replace(found, ranks=pl.concat([found.ranks, second]))
        text = console.render(replace(summaries["many"], stragglers=both))
        table = text.partition("\nRanks")[2].partition("\nBuckets")[0].splitlines()
        assert table[1].split()[:2] == ["module", "rank"]
        assert [line.split()[0] for line in table[2:20]] == ["0"] * 9 + ["1"] * 9
        assert table[20].startswith("  32 more ranks")

    def test_changes_are_told_in_the_order_of_the_steps(self, summaries: dict[str, Summary]) -> None:
        section = console.render(summaries["changing"]).partition("\nChanges during the run\n")[2].split("\n\n")[0]
        told = [re.sub(r"(\d+)\.\d+", r"\1", line.strip()) for line in section.splitlines()]
        sure = r" \(95 % confidence interval of the change \d+ to \d+ ms\)\."
        expected = [
            r"- The step time rose from 69 to 7[34] ms at step 60",
            r"- Rank 3 fell behind the other ranks by [45] ms at step 60",
            r"- The step time rose from 7[34] to 8[56] ms at step 120",
            r"- The step time fell from 8[56] to 8[01] ms at step 180",
            r"- Rank 3 caught up with the other ranks by [45] ms at step 180",
        ]
        assert len(told) == len(expected)
        for line, pattern in zip(told, expected, strict=True):
            assert re.fullmatch(pattern + sure, line)

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("slow", "Neither the step time nor the lateness of any rank went to another level."),
            ("short", "No change can be found: 3 comparable steps outside warm-up are too few: a change needs 64."),
        ],
    )
    def test_no_changes(self, summaries: dict[str, Summary], name: str, text: str) -> None:
        assert f"\nChanges during the run\n  {text}\n" in console.render(summaries[name])

    def test_many_changes_are_cut(self, summaries: dict[str, Summary]) -> None:
        changing = summaries["changing"].changes
        many = replace(changing, changes=pl.concat([changing.changes] * 4))
        text = console.render(replace(summaries["changing"], changes=many))
        section = text.partition("\nChanges during the run\n")[2].split("\n\n")[0].splitlines()
        assert section[-1] == "  - and 10 smaller ones; --format json lists all."
        assert len(section) == 11
        assert not any("Rank" in line for line in section), "the step time comes first"

    def test_many_problems_are_cut(self, summaries: dict[str, Summary]) -> None:
        lines = console.render(summaries["hostile"]).splitlines()
        assert sum(line.startswith("  - Rank") for line in lines[lines.index("Data quality") :]) == 10
        assert lines[-1] == "  - and 30 more like these; --format json lists all."

    def test_numbers_are_those_of_the_results(self, summaries: dict[str, Summary]) -> None:
        text = console.render(summaries["slow"])
        row = summaries["slow"].statistics.overall.row(1, named=True)
        (line,) = re.findall(r"^ +backward compute +(.*)$", text, re.MULTILINE)
        assert float(line.split()[1]) == pytest.approx(row["mean_ns"] / MS, rel=0.005)
        assert line.split()[0] == str(row["n"]) == "392"

    @pytest.mark.parametrize(
        ("restart", "line"), [(0, "  job       train-7\n"), (2, "  job       train-7, restarted 2 times before\n")]
    )
    def test_job(self, summaries: dict[str, Summary], restart: int, line: str) -> None:
        run = replace(summaries["slow"].run, job_id="train-7", restart=restart)
        assert line in console.render(replace(summaries["slow"], run=run))

    def test_list_of_runs(self, tmp_path: Path) -> None:
        first = Scenario(steps=5)
        second = replace(first, ranks=2, run="20260103T000000-00c0ffee", start_ns=1_767_398_400_000_000_000)
        for scenario in (first, second):
            write_log(simulate(scenario), tmp_path)
        head, *lines = console.render_runs(find_runs(tmp_path)).splitlines()
        assert head.split() == ["run", "started", "job", "restart", "ranks", "steps", "backend"]
        assert [re.split(r"  +", line) for line in lines] == [
            ["20260103T000000-00c0ffee", "2026-01-03 00:00:00 UTC", "-", "0", "2 of 2", "5", "gloo"],
            ["20260102T030405-0badcafe", "2026-01-02 03:04:05 UTC", "-", "0", "4 of 4", "5", "gloo"],
        ]
