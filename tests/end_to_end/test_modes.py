"""The collector goes wherever DDP goes: each way of using DDP, trained twice, with the collector and without."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from torch.nn.parallel import DistributedDataParallel

from .conftest import SCRIPTS, environment, run_process
from .mode_results import as_log, tell
from .modes import MODES, Mode, Run
from .write_modes_table import LACKING, PAGE, rows_of_table

if TYPE_CHECKING:
    from .conftest import RunLog

ReadRuns = Callable[[Path], "list[RunLog]"]

RANKS: Final = max(mode.ranks for mode in MODES)
"""A launch has as many ranks as its largest mode; in the others the last ranks stand by."""
SECONDS: Final = 400
"""Time for a launch with all of its modes, on a machine that does other things as well."""

pytestmark = pytest.mark.timeout(3 * SECONDS)


@dataclass(frozen=True)
class Pair:
    """A launch without the collector and the same launch with it.

    Attributes:
        off: by rank, what the script wrote about each mode.
        on: the same, recorded.
        runs: what was recorded.
    """

    off: list[Any]
    on: list[Any]
    runs: list[RunLog]

    def runs_of(self, mode: Mode) -> list[Run]:
        """The runs that began while rank 0 was in the mode."""
        facts = self.facts(mode, self.on)
        return [
            {rank: as_log(log, facts[rank]["told"]) for rank, log in run.ranks.items()}
            for begun_ns, run in self._begun
            if facts[0]["begin_ns"] <= begun_ns <= facts[0]["end_ns"]
        ]

    def facts(self, mode: Mode, launch: list[Any]) -> list[Any]:
        """What each rank of the mode wrote about it."""
        return [launch[rank][mode.name] for rank in range(mode.ranks)]

    @cached_property
    def _begun(self) -> list[tuple[int, RunLog]]:
        return [(run.ranks[0].metadata["clock"]["anchor_epoch_ns"], run) for run in self.runs]


def launch_of(mode: Mode) -> str:
    """The launch that a mode is part of."""
    return "torchrun" if mode.launch == "torchrun" else "multiprocessing"


def train(launch: str, names: list[str], *, logs: Path | None, out: Path) -> list[Any]:
    """Train modes of one launch, one after the other; what each rank wrote about them."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [sys.executable, *(torchrun if launch == "torchrun" else []), str(SCRIPTS / "run_modes.py"), str(out)]
    outcome = run_process([*command, *names], env=environment(logs, None), out=out, cwd=out, timeout=SECONDS)
    assert outcome.returncode == 0, outcome.stderr
    return [json.loads(path.read_text()) for path in sorted(out.glob("facts-*.json"))]


def exists(mode: Mode) -> bool:
    """Whether this torch has what the mode needs."""
    return not mode.option or mode.option in inspect.signature(DistributedDataParallel).parameters


@pytest.fixture(scope="session")
def pair(
    request: pytest.FixtureRequest, read_runs: ReadRuns, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Mode], Pair]:
    """Trains the modes of a launch without and with the collector, those that were asked for, once."""
    wanted = {
        item.callspec.params["mode"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and "mode" in getattr(getattr(item, "callspec", None), "params", {})
    }
    pairs: dict[str, Pair | str] = {}

    def train_both(launch: str) -> Pair:
        names = [mode.name for mode in MODES if launch_of(mode) == launch and mode in wanted and exists(mode)]
        off, on, logs = (tmp_path_factory.mktemp(name) for name in ("off", "on", "logs"))
        return Pair(train(launch, names, logs=None, out=off), train(launch, names, logs=logs, out=on), read_runs(logs))

    def pair_of(mode: Mode) -> Pair:
        launch = launch_of(mode)
        if launch not in pairs:
            pairs[launch] = "failed before"
            pairs[launch] = train_both(launch)
        found = pairs[launch]
        assert isinstance(found, Pair), found
        return found

    return pair_of


@pytest.fixture(params=MODES, ids=lambda mode: mode.name)
def mode(request: pytest.FixtureRequest) -> Mode:
    """Each mode."""
    of_request: Mode = request.param
    if not exists(of_request):
        pytest.skip(f"{LACKING}: {of_request.option}")
    return of_request


def test_training_is_unchanged(mode: Mode, pair: Callable[[Mode], Pair]) -> None:
    """Parameters, buffers and gradients are the same to the bit."""
    both = pair(mode)
    for off, on in zip(both.facts(mode, both.off), both.facts(mode, both.on), strict=True):
        assert on["tensors"] == off["tensors"] != []
        assert on["told"] == off["told"]


def test_nothing_is_said_or_lost(mode: Mode, pair: Callable[[Mode], Pair]) -> None:
    """No warning, no error in the collector, nothing dropped."""
    both = pair(mode)
    for on in both.facts(mode, both.on):
        assert [line for line in on["said"] if "recording" not in line] == []
    for run in both.runs_of(mode):
        for log in run.values():
            assert log.metadata["closed"]
            counters = log.metadata["counters"]
            assert counters["errors"] == counters["late_ends"] == sum(counters["dropped"].values()) == 0


def test_ranks_join(mode: Mode, pair: Callable[[Mode], Pair]) -> None:
    """Rows with the same group and number are the same collective on all ranks of the group."""
    for run in pair(mode).runs_of(mode):
        seen: dict[tuple[int, int], dict[int, Any]] = {}
        for log in run.values():
            for row in log.collectives:
                seen.setdefault((row["group"], row["seq"]), {})[log.rank] = (row["op"], row["bytes"], row["bucket"])
        groups = {number: info for log in run.values() for number, info in log.metadata["groups"].items()}
        joined = any(
            info["joined_after_step"] is not None for log in run.values() for info in log.metadata["modules"].values()
        )
        for (group, _), by_rank in seen.items():
            assert sorted(by_rank) == sorted(groups[str(group)]["ranks"])
            what = {(op, size) if joined else (op, size, bucket) for op, size, bucket in by_rank.values()}
            assert len(what) == 1, by_rank


def test_rows_are_what_happened(
    mode: Mode, pair: Callable[[Mode], Pair], record_property: Callable[[str, object], None]
) -> None:
    runs = pair(mode).runs_of(mode)
    tell((log for run in runs for log in run.values()), record_property)
    mode.expect(runs)


def test_documentation_has_every_mode() -> None:
    rows = rows_of_table(PAGE.read_text())
    names = [mode.name for mode in MODES]
    assert len(set(names)) == len(names)
    assert [name for name in rows if name in names] == names
