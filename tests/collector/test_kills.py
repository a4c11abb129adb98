"""A writer that is killed at any moment loses nothing: what returned before the kill is read, and read once."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpan.collector.schema import LIVE_METADATA, SPOOL_PATTERN, TABLES, read_spool

KILLS = 20
KILLS_LONG = 200
LAUNCHED, DROPPED, ENDED = 1, 2, 3
SCRIPT = Path(__file__).parent / "scripts" / "killed_writer.py"
KEY = {"collectives": "seq", "steps": "step"}
LAST = {"collectives": "end_ns", "steps": "optimizer_end_ns"}
ReadRank = Callable[[Path], dict[str, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def killed(long: bool, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folders of writers that were killed, each at its own moment."""
    base = tmp_path_factory.mktemp("killed")
    folders = [base / f"{number:03d}" for number in range(KILLS_LONG if long else KILLS)]
    for folder in folders:
        folder.mkdir()
    subprocess.run([sys.executable, str(SCRIPT), *map(str, folders)], check=True, timeout=240)
    return folders


def noted(folder: Path, table: str) -> list[int]:
    """What the writer knew of each event, from the first to the last that it was about to note."""
    path = folder / f"{table}.notes"
    return list(path.read_bytes().rstrip(b"\0")) if path.exists() else []


def counted_as_dropped(folder: Path) -> int:
    """Events that were dropped, by the counters of the segments, which only ever grow."""
    counters = [read_spool(path).counters for path in folder.glob(SPOOL_PATTERN)]
    return max((sum(n for name, n in c.items() if name.startswith("dropped_")) for c in counters), default=0)


def phase(folder: Path) -> str:
    """Where the kill met the thread in the background, as far as its files tell."""
    names = {path.name for path in folder.iterdir()}
    if any(name.startswith(".live-") for name in names):
        return "making a segment"
    if any(name.startswith(f".{LIVE_METADATA}") for name in names):
        return "writing metadata"
    if any(name.startswith((".collectives", ".steps")) for name in names):
        return "writing a part"
    parts = {table: {name[-14:-8] for name in names if name.startswith(f"{table}-")} for table in TABLES}
    if parts["steps"] != parts["collectives"]:
        return "between the two parts"
    if parts["steps"] & {name[5:11] for name in names if name.startswith("live-")}:
        return "removing a segment"
    return "between two tasks" if parts["steps"] else "before the first part"


def test_every_event_is_read_exactly_once(killed: list[Path], read_rank: ReadRank) -> None:
    found: Counter[str] = Counter()
    uncounted = 0
    phases: Counter[str] = Counter()
    for folder in killed:
        rows = read_rank(folder)
        phases[phase(folder)] += 1
        dropped = sum(noted(folder, table).count(DROPPED) for table in TABLES)
        # The last event may be counted and not noted.
        uncounted += counted_as_dropped(folder) not in (dropped, dropped + 1)
        for table in TABLES:
            notes = noted(folder, table)
            seen = {row[KEY[table]]: row[LAST[table]] for row in rows[table]}
            returned = {number for number, note in enumerate(notes) if note in (LAUNCHED, ENDED)}
            found["recorded"] += len(returned)
            found["dropped"] += notes.count(DROPPED)
            found["lost"] += len(returned - seen.keys())
            found["doubled"] += len(rows[table]) - len(seen)
            found["without its end"] += sum(note == ENDED and seen.get(n, 0) is None for n, note in enumerate(notes))
            assert seen.keys() - returned <= {len(notes)}, f"{folder}: more than the one event on its way"
    print(f"\n{len(killed)} kills: {dict(found)}\nmet while {dict(phases)}")  # noqa: T201 - the figures, with -s
    assert uncounted == 0, "the log should say how many events were dropped"
    assert (found["lost"], found["doubled"], found["without its end"]) == (0, 0, 0)
    assert found["recorded"] > 100 * len(killed), "the writers should have come far enough to lose something"
    assert phases["before the first part"] < 0.8 * len(killed), "kills should hit writers that turn segments into parts"
    assert phases["writing a part"] + phases["between the two parts"] + phases["writing metadata"] > 0
