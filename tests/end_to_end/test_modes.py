"""The collector goes wherever DDP goes: each way of using DDP, trained twice, with the collector and without."""

from __future__ import annotations

import inspect
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

RANKS: Final = {"three": 3, "four": 4, "late": 3, "spawn": 2, "fork": 2}
"""The launches, and the ranks of each; the last two are started by torch.multiprocessing."""
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
        facts = [of_rank[mode.name] for of_rank in self.on]
        return [
            {rank: as_log(log, facts[rank]["told"]) for rank, log in run.ranks.items()}
            for begun_ns, run in self._begun
            if facts[0]["begin_ns"] <= begun_ns <= facts[0]["end_ns"]
        ]

    @cached_property
    def _begun(self) -> list[tuple[int, RunLog]]:
        return [(run.ranks[0].metadata["clock"]["anchor_epoch_ns"], run) for run in self.runs]


def train(launch: str, names: list[str], *, logs: Path | None, out: Path) -> list[Any]:
    """Train modes of one launch, one after the other; what each rank wrote about them."""
    alone = launch in ("spawn", "fork")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS[launch])]
    late = str(logs) if launch == "late" and logs is not None else "-"
    script = [str(SCRIPTS / "run_modes.py"), str(out), launch if alone else "torchrun", late, *names]
    env = environment(None if launch == "late" else logs, None)
    command = [sys.executable, *([] if alone else torchrun), *script]
    outcome = run_process(command, env=env, out=out, cwd=out, timeout=SECONDS)
    assert outcome.returncode == 0, outcome.stderr
    return [outcome.facts(rank) for rank in range(RANKS[launch])]


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
        names = [mode.name for mode in MODES if mode.launch == launch and mode in wanted and exists(mode)]
        off, on, logs = (tmp_path_factory.mktemp(name) for name in ("off", "on", "logs"))
        return Pair(train(launch, names, logs=None, out=off), train(launch, names, logs=logs, out=on), read_runs(logs))

    def pair_of(mode: Mode) -> Pair:
        if mode.launch not in pairs:
            pairs[mode.launch] = "failed before"
            pairs[mode.launch] = train_both(mode.launch)
        found = pairs[mode.launch]
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
    for off, on in zip(both.off, both.on, strict=True):
        assert on[mode.name]["tensors"] == off[mode.name]["tensors"] != []
        assert on[mode.name]["told"] == off[mode.name]["told"]


def test_nothing_is_said_or_lost(mode: Mode, pair: Callable[[Mode], Pair]) -> None:
    """No warning, no error in the collector, nothing dropped."""
    both = pair(mode)
    for on in both.on:
        assert [line for line in on[mode.name]["said"] if "recording" not in line] == []
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
