"""The reports: whatever the run, they render, say nothing wrong, and lose nothing on the way."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import polars as pl
import pytest

from ddpan.analysis import Problem, Summary, Verdict, find_runs, load, summarize
from ddpan.analysis.reports import REPORTS, console
from ddpan.analysis.reports._answer import answer
from ddpan.analysis.reports.console import Terminal
from ddpan.analysis.reports.csv import COLUMNS
from ddpan.analysis.testing import Fault, Scenario, simulate, write_log

MS = 1_000_000
DOCUMENTATION = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
HOSTILE = "\x1b[31mgpu|1`<b>\n"

SLOW = Scenario(noise=0.02, faults=(Fault(rank=2, cause="data", delay_ns=30 * MS),))
SCENARIOS: Mapping[str, tuple[Scenario, dict[str, Any]]] = {
    "healthy": (Scenario(noise=0.02), {}),
    "slow": (SLOW, {}),
    "many": (replace(SLOW, ranks=24, buckets=20, steps=40), {}),
    "changing": (
        Scenario(
            steps=240,
            noise=0.02,
            faults=(
                *(Fault(rank=rank, cause="forward", delay_ns=12 * MS, first_step=120) for rank in range(4)),
                Fault(rank=3, cause="data", delay_ns=5 * MS, first_step=60, end_step=180),
            ),
        ),
        {},
    ),
    "accumulating": (replace(SLOW, micro_batches=3, steps=40), {}),
    "alone": (Scenario(ranks=1, steps=40), {}),
    "short": (Scenario(steps=5), {}),
    "lossy": (replace(SLOW, steps=60, lost={1: 0.2}), {}),
    "empty": (Scenario(steps=5), {"steps": (1000, 2000)}),
}


@pytest.fixture(scope="module")
def summaries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Summary]:
    """The summary of each scenario, and of two runs with something odd about them."""
    found = {}
    for name, (scenario, options) in SCENARIOS.items():
        found[name] = summarize(load(write_log(simulate(scenario), tmp_path_factory.mktemp(name)), **options))
    slow = found["slow"]
    ranks = slow.stragglers.ranks.with_columns(host=pl.lit(HOSTILE))
    problems = tuple(Problem("seq_gap", f"rank {rank} of {HOSTILE} lacks rows", (rank,)) for rank in range(40))
    found["hostile"] = replace(
        slow,
        hosts={HOSTILE: (0, 1, 2), "plain": (3,)},
        problems=problems,
        stragglers=replace(slow.stragglers, ranks=ranks),
        changes=found["changing"].changes,
    )
    nan = slow.stragglers.ranks.with_columns(delay_ns=pl.lit(math.nan), wait_ns=pl.lit(math.inf))
    found["not finite"] = replace(slow, stragglers=replace(slow.stragglers, ranks=nan))
    return found


NAMES = [*SCENARIOS, "hostile", "not finite"]


@pytest.fixture(params=NAMES)
def summary(request: pytest.FixtureRequest, summaries: dict[str, Summary]) -> Summary:
    return summaries[request.param]


def judged(summary: Summary, verdict: Verdict, *others: Verdict) -> Summary:
    """``summary`` with other verdicts."""
    return replace(
        summary,
        stragglers=replace(
            summary.stragglers, verdict=verdict, named=(verdict, *others), step_time_without_all_ns=88e6
        ),
    )


def refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is no JSON")


def parse(summary: Summary) -> dict[str, Any]:
    parsed = json.loads(REPORTS["json"](summary), parse_constant=refuse)
    assert isinstance(parsed, dict)
    return parsed


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


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


LATE = "18.4 ms later than the other ranks (95 % confidence interval 17.1 to 19.6 ms)"


class TestAnswer:
    def test_slow_rank(self, summaries: dict[str, Summary]) -> None:
        first, cost, step = answer(summaries["slow"])
        amount = re.fullmatch(
            r"Rank 2 \(on host-000\) is slow in loading its data: in nearly every step it is (\S+) ms later than the "
            r"other ranks \(95 % confidence interval (\S+) to (\S+) ms\)\.",
            first,
        )
        assert amount is not None
        delay, low, high = map(float, amount.groups())
        assert low < 30 < high
        assert delay == pytest.approx(30, rel=0.03)
        assert re.fullmatch(
            r"The other ranks wait for it: a step takes \S+ ms on average and would take \S+ ms without the delay, "
            r"so \d+ % of the time is lost: \S+ s in 98 steps\.",
            cost,
        )
        assert step.startswith("Next: look at the input of rank 2: number of DataLoader workers")

    @pytest.mark.parametrize(
        ("changes", "first"),
        [
            (
                {"cause": "backward", "first_late_bucket": 4},
                f"Rank 1 (on host-000) is slow in its backward pass: in nearly every step it is {LATE},"
                " from gradient bucket 4 on.",
            ),
            (
                {"cause": "backward", "first_late_bucket": 4, "first_late_parameters": ("a.weight", "a.bias", "b")},
                f"Rank 1 (on host-000) is slow in its backward pass: in nearly every step it is {LATE},"
                " from gradient bucket 4 on (a.weight and 2 more parameters).",
            ),
            (
                {"cause": "backward", "first_late_bucket": 0},
                f"Rank 1 (on host-000) is slow in its backward pass: in nearly every step it is {LATE},"
                " already before the first gradient bucket (the loss, or the last layers of the "
                "model).",
            ),
            (
                {"cause": "forward", "kind": "onset", "first_step": 512},
                f"Rank 1 (on host-000) is slow in its forward pass: in every step since step 512 it is {LATE}.",
            ),
            (
                {"cause": "optimizer", "kind": "transient", "first_step": 60, "last_step": 110},
                f"Rank 1 (on host-000) is slow in its optimizer step: in steps 60 to 110 it is {LATE}.",
            ),
            (
                {"cause": "other", "kind": "intermittent", "affected_steps": 30},
                "Rank 1 (on host-000) is slow in code of its training loop outside data loading, "
                f"forward, backward and optimizer: now and then, in 30 of 1,000 steps, it is {LATE}.",
            ),
            (
                {"cause": None, "delay_low_ns": None, "rank": 77},
                "Rank 77 is slow in a part of the step that the log does not show: in nearly every "
                "step it is 18.4 ms later than the other ranks.",
            ),
        ],
    )
    def test_every_kind_and_cause(self, summaries: dict[str, Summary], changes: dict[str, Any], first: str) -> None:
        lines = answer(judged(summaries["slow"], replace(VERDICT, **changes)))
        assert lines[0] == first
        assert lines[-1].startswith("Next: ")

    def test_cost_in_gpu_hours_where_there_are_gpus(self, summaries: dict[str, Summary]) -> None:
        on_gpus = replace(judged(summaries["slow"], VERDICT), devices=("cuda",))
        assert answer(on_gpus)[1] == (
            "The other ranks wait for it: a step takes 120 ms on average and would take 102 ms without the delay, so "
            "15 % of the time is lost: 18.0 s or 0.32 GPU-hours in 1,000 steps."
        )

    def test_several_slow_ranks(self, summaries: dict[str, Summary]) -> None:
        others = [replace(VERDICT, rank=rank, cause="data", delay_low_ns=None) for rank in range(4, 9)]
        assert answer(judged(summaries["slow"], VERDICT, *others))[2] == (
            "Also slow: rank 4 in loading its data, 18.4 ms in nearly every step; rank 5 in loading its data, 18.4 ms "
            "in nearly every step; rank 6 in loading its data, 18.4 ms in nearly every step; and 2 more ranks. "
            "With all of these put right, a step would take 88.0 ms."
        )

    def test_a_slow_host(self, summaries: dict[str, Summary]) -> None:
        first, cost, step = answer(judged(summaries["slow"], replace(VERDICT, ranks=(4, 5, 6, 7), host="node-7")))
        assert first == (
            f"All 4 ranks of host node-7 (4-7) are slow in their forward pass: in nearly every step they are {LATE}."
        )
        assert cost.startswith("The other ranks wait for them: a step takes 120 ms on average and would take 102 ms")
        assert step.startswith("Next: compare node-7 with another host")

    def test_a_slow_process_group(self, summaries: dict[str, Summary]) -> None:
        first, *_ = answer(judged(summaries["slow"], replace(VERDICT, ranks=(0, 2), group="mesh_dp")))
        assert first.startswith("All 2 ranks of process group mesh_dp (0,2) are slow in their forward pass: in nearly")

    @pytest.mark.parametrize(
        ("kind", "when", "than"),
        [("onset", "since step 512", "before"), ("transient", "in steps 512 to 999", "the others")],
    )
    def test_a_slow_transfer(self, summaries: dict[str, Summary], kind: Any, when: str, than: str) -> None:
        slow = replace(VERDICT, kind=kind, rank=None, ranks=(), cause="collective", first_step=512)
        changed = judged(summaries["slow"], slow)
        first, cost, step = answer(replace(changed, stragglers=replace(changed.stragglers, named=())))
        assert first == (
            f"No rank is late, but the gradient transfer is slow for all of them {when}: each step takes 18.4 ms "
            f"longer than {than} (95 % confidence interval 17.1 to 19.6 ms)."
        )
        assert cost.startswith(
            "A step takes 120 ms on average and would take 102 ms without the delay, so 15 % of the time"
        )
        assert step.startswith("Next: look at the network")

    def test_nobody_is_slow(self, summaries: dict[str, Summary]) -> None:
        first, time, step = answer(summaries["healthy"])
        assert re.fullmatch(
            r"No straggler: none of 4 ranks is regularly later than the others, in 98 steps of 69\.\d ms on average\.",
            first,
        )
        assert re.match(r"Where the time of a step goes: 5\d % backward from the first gradient bucket on, 2\d %", time)
        assert step.startswith("Next: ")

    def test_nobody_is_slow_but_the_step_time_rose(self, summaries: dict[str, Summary]) -> None:
        changing, verdict = summaries["changing"], Verdict(kind="none", reason="", module=0, steps=238)
        changed = replace(changing, stragglers=replace(changing.stragglers, verdict=verdict, named=()))
        _, time, step = answer(changed)
        assert re.match(
            r"The step time rose from 7\d\.\d to 8\d\.\d ms at step 120 \(95 % confidence interval of the change "
            r"1\d\.\d to 1\d\.\d ms\), for all ranks alike\. Where the time of a step goes: ",
            time,
        )
        assert step.startswith("Next: look for what changed for all ranks at step 120")

    @pytest.mark.parametrize(
        ("part", "advice"),
        [
            ("transfer", "bucket_cap_mb"),
            ("wait", "uneven batches"),
            ("data", "DataLoader workers"),
            ("forward", "little"),
        ],
    )
    def test_nobody_is_slow_but_something_could_be_saved(
        self, summaries: dict[str, Summary], part: str, advice: str
    ) -> None:
        split = summaries["healthy"].step_split.with_columns(share=pl.when(part=part).then(0.5).otherwise(0.03))
        assert advice in answer(replace(summaries["healthy"], step_split=split))[2]

    @pytest.mark.parametrize("name", ["alone", "short", "empty"])
    def test_cannot_tell(self, summaries: dict[str, Summary], name: str) -> None:
        reason, _, advice = summaries[name].stragglers.verdict.reason.partition(" Next: ")
        lines = answer(summaries[name])
        assert lines[0] == f"Cannot tell whether a rank is slow. {reason}"
        assert [line for line in lines if line.startswith("Next: ")] == ([f"Next: {advice}"] if advice else [])

    def test_rotating(self, summaries: dict[str, Summary]) -> None:
        verdict = replace(VERDICT, kind="rotating", reason="One is late. Next: look for it.", rank=None, ranks=())
        first, cost, step = answer(judged(summaries["healthy"], verdict))
        assert first == "No single rank is slow. One is late."
        assert re.match(
            r"A step takes 120 ms on average and would take 102 ms without these waits, so 15 % of the time is lost: "
            r"18\.0 s in 1,000 steps\.$",
            cost,
        )
        assert step == "Next: look for it."


VERDICT = Verdict(
    kind="persistent",
    reason="",
    module=0,
    steps=1000,
    step_time_ns=120e6,
    rank=1,
    ranks=(1,),
    cause="forward",
    first_step=2,
    last_step=999,
    affected_steps=1000,
    delay_ns=18.4e6,
    delay_low_ns=17.1e6,
    delay_high_ns=19.6e6,
    confidence=0.95,
    last_share=1.0,
    p_value=1e-9,
    step_time_without_ns=102e6,
    lost_seconds=18.0,
    lost_gpu_hours=0.32,
)


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
