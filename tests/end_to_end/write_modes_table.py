"""Writes the table of modes in docs/collector.md from a run of the tests with each of several Pythons.

Called as ``python tests/end_to_end/write_modes_table.py PYTHON...``, each with another torch installed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

__all__ = ["LACKING", "PAGE", "UNCHANGED", "read_report", "render", "rows_of_table"]

TESTS: Final = Path(__file__).parent
PAGE: Final = TESTS.parents[1] / "docs" / "collector.md"
BEGIN: Final = "<!-- modes: begin -->\n"
END: Final = "<!-- modes: end -->\n"
TAPS: Final = {"reducer_group": "group of the reducer", "process_group_hooks": "process-group hooks"}

UNCHANGED: Final = "unchanged"
LACKING: Final = "not in this torch"
FAILED: Final = "**failed**"
UNTRIED: Final = "not tried"


@dataclass
class Result:
    """What the tests found out about one mode on one torch.

    Attributes:
        failed: tests of it that failed.
        lacking: whether this torch has no such mode.
        facts: what the test of its rows told about the log.
    """

    failed: int = 0
    lacking: bool = False
    facts: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """What the table says: only what was tried and failed no test is called unchanged."""
        if self.failed:
            return FAILED
        if not self.facts:
            return LACKING if self.lacking else UNTRIED
        counts = ("forwards", "backwards", "buckets")
        return f"{UNCHANGED}: " + ", ".join(f"{self.facts[name]} {name}" for name in counts)


Results = dict[str, Result]
"""Results by the name of the mode, in the order of the tests."""


def rows_of_table(page: str) -> dict[str, list[str]]:
    """The results in the table of the page, by the name of the mode."""
    table = page.partition(BEGIN)[2].partition(END)[0]
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()[2:]]
    return {row[0]: row[1:] for row in rows}


def run_tests(python: str, report: Path) -> Results:
    """Run the tests of the modes and read their report."""
    tests = [str(TESTS / name) for name in ("test_modes.py", "test_frameworks.py")]
    # Of the families of reports this one holds what tests tell about themselves.
    options = ["-q", "-o", "junit_family=xunit1", f"--junitxml={report}"]
    subprocess.run([python, "-m", "pytest", *options, *tests], cwd=TESTS.parents[1], check=False)
    return read_report(report.read_text())


def read_report(report: str) -> Results:
    """The results in a report of pytest, of the tests that have the name of a mode as their parameter."""
    results: Results = {}
    for case in ET.fromstring(report).iter("testcase"):
        name = case.get("name", "").partition("[")[2].removesuffix("]")
        if not name:
            continue
        result = results.setdefault(name, Result())
        result.failed += len(case.findall("failure")) + len(case.findall("error"))
        result.lacking |= any(skipped.get("message", "").startswith(LACKING) for skipped in case.iter("skipped"))
        result.facts |= {p.get("name", ""): p.get("value", "") for p in case.iter("property")}
    return results


def render(columns: Sequence[Results]) -> str:
    """The table, one column of results for each run of the tests."""
    names = list(dict.fromkeys(name for results in columns for name in results))
    lines = [
        ["mode", *(title(results) for results in columns)],
        ["---"] * (len(columns) + 1),
        *([name, *(str(results.get(name, Result())) for results in columns)] for name in names),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def title(results: Mapping[str, Result]) -> str:
    """Tap and torch of a run of the tests."""
    facts = next((result.facts for result in results.values() if result.facts), {})
    return f"{TAPS.get(facts.get('tap', ''), 'unknown')}, torch {facts.get('torch', 'unknown')}"


def main() -> None:
    """Run the tests with each Python and put their results into the page."""
    if len(sys.argv) < 2:
        sys.exit(str(__doc__))
    with tempfile.TemporaryDirectory() as folder:
        columns = [run_tests(python, Path(folder, f"{n}.xml")) for n, python in enumerate(sys.argv[1:])]
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    if not begin or END not in rest:
        sys.exit(f"{PAGE} has no lines {BEGIN.strip()} and {END.strip()} to write between")
    PAGE.write_text(before + begin + render(columns) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
