"""The reports and commands on one measure: ``stragglers``, ``whatif``, ``clock`` and ``collectives``."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import polars as pl
import pytest
from click.testing import CliRunner, Result

from ddpan.analysis import clock_offsets, collectives, load, stragglers, whatif
from ddpan.analysis.cli import main
from ddpan.analysis.reports import DOCUMENTS, console
from ddpan.analysis.reports.clock import clock_document
from ddpan.analysis.reports.collectives import collectives_document
from ddpan.analysis.reports.console import Terminal
from ddpan.analysis.reports.document import Document
from ddpan.analysis.reports.stragglers import stragglers_document
from ddpan.analysis.reports.whatif import whatif_document
from ddpan.analysis.run import Run
from ddpan.analysis.testing import Fault, Scenario, SyntheticRun, simulate, write_log

MS, HOUR_NS = 1_000_000, 3_600_000_000_000
PAGE = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
HOSTILE = "\x1b[31mgpu|1`<b>\n"

SLOW = Scenario(
    ranks=6,
    ranks_per_host=2,
    noise=0.02,
    faults=(Fault(rank=2, cause="data", delay_ns=30 * MS),),
    clock_offset_ns={1: 5 * HOUR_NS},
)
SCENARIOS: Mapping[str, Scenario] = {
    "slow": SLOW,
    "healthy": Scenario(noise=0.02),
    "many": replace(SLOW, ranks=40, steps=40),
    "alone": Scenario(ranks=1, steps=40),
    "short": Scenario(steps=1),
    "lossy": replace(SLOW, steps=60, lost=dict.fromkeys(range(6), 0.3)),
}
MEASURES: Mapping[str, Callable[[Run], Document]] = {
    "stragglers": lambda run: stragglers_document(run, stragglers(run)),
    "whatif": lambda run: whatif_document(run, whatif(run)),
    "clock": lambda run: clock_document(run, clock_offsets(run)),
    "collectives": lambda run: collectives_document(run, collectives(run)),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A run of each scenario, one whose hosts have odd names, and one with clocks that cannot be aligned."""

    def opened(name: str, run: SyntheticRun) -> Run:
        return load(write_log(run, tmp_path_factory.mktemp(name)))

    found = {name: opened(name, simulate(scenario)) for name, scenario in SCENARIOS.items()}
    odd: Any = {rank: {**one, "host": HOSTILE, "device": "cuda"} for rank, one in found["slow"].metadata.items()}
    found["hostile"] = replace(found["slow"], metadata=odd)
    apart = simulate(SLOW)
    metadata: Any = {}
    for rank, one in apart.metadata.items():
        ranks = [0, 1] if rank < 2 else [2, 3, 4, 5]
        metadata[rank] = {**one, "groups": {"0": {"name": "0", "ranks": ranks, "backend": "gloo"}}}
    found["apart"] = opened("apart", replace(apart, metadata=metadata))
    return found


@pytest.fixture(params=[*SCENARIOS, "hostile", "apart"])
def run(request: pytest.FixtureRequest, runs: dict[str, Run]) -> Run:
    return runs[request.param]


def refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is no JSON")


def documented(title: str) -> list[set[str]]:
    """Keys in each table of a section of docs/json.md."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    return [
        {key for row in block.splitlines() for key in re.findall(r"`(\w+)`", row.split("|")[1])} for block in blocks
    ]


@pytest.mark.parametrize("measure", MEASURES)
class TestEveryRun:
    @pytest.mark.parametrize("form", DOCUMENTS)
    def test_is_text_without_odd_values(self, run: Run, measure: str, form: str) -> None:
        text = DOCUMENTS[form](MEASURES[measure](run))
        assert text.strip()
        assert text.endswith("\n")
        assert not re.search(r"\b(nan|inf|NaN|Infinity|None)\b", text)
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)

    def test_fits_a_terminal(self, run: Run, measure: str) -> None:
        text = console.render_document(MEASURES[measure](run), terminal=Terminal(width=120, colour=False))
        assert max(map(len, text.splitlines())) <= 120

    def test_csv_holds_what_json_does(self, run: Run, measure: str) -> None:
        document = MEASURES[measure](run)
        parsed = json.loads(DOCUMENTS["json"](document), parse_constant=refuse)
        rows = list(csv.DictReader(io.StringIO(DOCUMENTS["csv"](document))))
        for table in document.tables:
            values = [row for row in rows if row["table"] == table]
            metrics = [key for key in (parsed[table][0] if parsed[table] else ()) if key not in document.keys]
            assert [row["metric"] for row in values] == metrics * len(parsed[table])


class TestJson:
    def test_keys_of_stragglers(self, runs: dict[str, Run]) -> None:
        parsed = json.loads(DOCUMENTS["json"](MEASURES["stragglers"](runs["slow"])))
        (head,) = documented("ddpan stragglers")
        assert parsed.keys() == head | {"schema_version", "ddpan_version", "answer"}
        for name, title in (("verdicts", "verdict"), ("ranks", "ranks"), ("buckets", "buckets")):
            (keys,) = documented(title)
            assert parsed[name][0].keys() == keys

    def test_keys_of_whatif(self, runs: dict[str, Run]) -> None:
        parsed = json.loads(DOCUMENTS["json"](MEASURES["whatif"](runs["slow"])))
        head, tables = documented("ddpan whatif")
        assert parsed.keys() == head | {"schema_version", "ddpan_version", "answer"}
        found = set().union(*(parsed[name][0] for name in ("scenarios", "ranks", "top")))
        assert found == tables

    def test_keys_of_clock(self, runs: dict[str, Run]) -> None:
        parsed = json.loads(DOCUMENTS["json"](MEASURES["clock"](runs["slow"])))
        head, clocks, waits = documented("ddpan clock")
        assert parsed.keys() == head | {"schema_version", "ddpan_version", "answer"}
        assert parsed["hosts"][0].keys() | parsed["ranks"][0].keys() == clocks
        assert parsed["waits"][0].keys() == waits

    def test_keys_of_collectives(self, runs: dict[str, Run]) -> None:
        parsed = json.loads(DOCUMENTS["json"](MEASURES["collectives"](runs["slow"])))
        head, sizes, ranks = documented("ddpan collectives")
        assert parsed.keys() == head | {"schema_version", "ddpan_version", "answer"}
        assert parsed["sizes"][0].keys() == sizes
        assert parsed["ranks"][0].keys() == ranks


class TestAnswers:
    def test_whatif(self, runs: dict[str, Run]) -> None:
        ideal, alone, hidden = MEASURES["whatif"](runs["slow"]).answer
        assert re.fullmatch(
            r"If no rank were later than the median, a step would take 6[89]\.\d ms instead of 9[89]\.\d ms: "
            r"30 % of the time, 2\.\d+ s in the 98 steps compared\.",
            ideal,
        )
        assert re.match(
            r"Rank 2 alone accounts for (9\d|100) % of that: with it at the median, a step would take", alone
        )
        assert re.match(
            r"If all gradient communication were hidden .*, a step would take 9[56]\.\d ms, 3\.\d % less\.", hidden
        )

    def test_whatif_on_gpus_counts_their_hours(self, runs: dict[str, Run]) -> None:
        document = MEASURES["whatif"](runs["hostile"])
        assert re.search(r"s or 0\.00\d+ GPU-hours in the 98 steps", document.answer[0])
        assert "GPU-hours" in DOCUMENTS["markdown"](document).partition("slowdown")[2]
        assert "GPU-hours" not in DOCUMENTS["markdown"](MEASURES["whatif"](runs["slow"]))

    def test_whatif_without_anything_to_gain(self, runs: dict[str, Run]) -> None:
        answer = MEASURES["whatif"](runs["healthy"]).answer
        assert re.match(
            r"There is little to gain between the ranks: a step takes 69\.\d ms, and 6\d\.\d ms if no", answer[0]
        )

    @pytest.mark.parametrize("name", ["alone", "short"])
    def test_whatif_without_an_answer(self, runs: dict[str, Run], name: str) -> None:
        document = MEASURES["whatif"](runs[name])
        assert len(document.answer) == 1
        assert document.answer[0].startswith("Cannot tell: no steps of two ranks or more can be compared")
        assert not document.fine

    def test_clock(self, runs: dict[str, Run]) -> None:
        document = MEASURES["clock"](runs["slow"])
        first, second = document.answer
        assert first == "The clocks of 3 hosts are aligned: they differ by up to 300 min, known to within 0.002 ms."
        assert second == "Waits by durations and waits by launches on the aligned clocks agree on every rank."
        assert document.fine

    def test_one_host_has_one_clock(self, runs: dict[str, Run]) -> None:
        assert MEASURES["clock"](runs["healthy"]).answer[0] == "All 4 ranks are on one host and share its clock."

    def test_clocks_that_cannot_be_aligned_are_named(self, runs: dict[str, Run]) -> None:
        document = MEASURES["clock"](runs["apart"])
        assert document.answer[1] == (
            "The clocks of ranks 0, 1 cannot be aligned with that of rank 2: too few collectives in common. "
            "Compare none of their timestamps with those of other ranks."
        )
        assert not document.fine

    @pytest.mark.parametrize("name", ["alone", "short"])
    def test_no_clocks(self, runs: dict[str, Run], name: str) -> None:
        assert MEASURES["clock"](runs[name]).answer[0].startswith("No clocks can be aligned: no two ranks share enough")

    def test_waits_that_disagree_are_told(self, runs: dict[str, Run]) -> None:
        offsets = clock_offsets(runs["slow"])
        late = pl.when(pl.col("rank") == 3).then(pl.lit(False)).otherwise("agree").alias("agree")
        document = clock_document(runs["slow"], replace(offsets, waits=offsets.waits.with_columns(late)))
        assert re.search(r"disagree on ranks 3: do not trust waits", document.answer[-1])
        assert not document.fine


class TestCommands:
    @pytest.fixture(scope="class")
    @staticmethod
    def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_log(simulate(SLOW), tmp_path_factory.mktemp("logs")).parent

    @staticmethod
    def ddpan(*words: str | Path) -> Result:
        return CliRunner().invoke(main, [str(word) for word in words], prog_name="ddpan")

    @pytest.mark.parametrize("command", MEASURES)
    @pytest.mark.parametrize("form", DOCUMENTS)
    def test_formats(self, logs: Path, command: str, form: str) -> None:
        result = self.ddpan(command, logs, "--format", form)
        assert result.exit_code == 0
        assert result.stderr == ""
        assert result.stdout.startswith({"json": "{\n", "csv": "table,", "markdown": "**"}.get(form, ""))

    @pytest.mark.parametrize("command", MEASURES)
    def test_options(self, logs: Path, tmp_path: Path, command: str) -> None:
        file = tmp_path / "report.json"
        options = ("--steps", "10:80", "--ranks", "0-3", "--format", "json", "--output", file)
        assert self.ddpan(command, logs, *options).exit_code == 0
        assert {row["rank"] for row in json.loads(file.read_text())["ranks"]} == {0, 1, 2, 3}

    @pytest.mark.parametrize("command", MEASURES)
    def test_no_log(self, tmp_path: Path, command: str) -> None:
        result = self.ddpan(command, tmp_path)
        assert result.exit_code == 3
        assert result.stderr.startswith("Error: ")

    def test_top(self, logs: Path) -> None:
        result = self.ddpan("whatif", logs, "--top", "5", "--format", "json")
        assert [row["fixed"] for row in json.loads(result.stdout)["top"]] == [1, 2, 3, 4, 5]
        assert self.ddpan("whatif", logs, "--top", "0").exit_code == 2
