"""Launching real trainings with torchrun, and reading their logs with nothing but polars and the schema."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import polars as pl
import pytest

from ddpan.collector.schema import LIVE_METADATA, METADATA_KEY, OPS, TABLES, Metadata, Spool, part_name, read_spool

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Outcome:
    """How a launch ended.

    Attributes:
        returncode: of torchrun.
        stdout: what all ranks and torchrun printed there.
        stderr: the same for stderr.
        out: folder that the script was given for files of its own.
    """

    returncode: int
    stdout: str
    stderr: str
    out: Path

    @property
    def said(self) -> list[str]:
        """The lines of the collector on stderr."""
        return [line for line in self.stderr.splitlines() if "ddpan:" in line]

    def facts(self, rank: int) -> Any:
        """What the script of a rank wrote about itself."""
        return json.loads((self.out / f"facts-{rank}.json").read_text())


@dataclass(frozen=True)
class RankLog:
    """The folder of one rank."""

    path: Path

    @property
    def steps(self) -> pl.DataFrame:
        return self._table("steps")

    @property
    def collectives(self) -> pl.DataFrame:
        return self._table("collectives")

    @property
    def buckets(self) -> pl.DataFrame:
        """The collectives that are buckets."""
        return self.collectives.filter(pl.col("bucket").is_not_null())

    @property
    def metadata(self) -> Metadata:
        """The newest metadata."""
        live = self.path / LIVE_METADATA
        if live.exists():
            loaded: Metadata = json.loads(live.read_text())
            return loaded
        newest = max(self.path.glob("steps-*.parquet"))
        from_part: Metadata = json.loads(pl.read_parquet_metadata(newest)[METADATA_KEY])
        return from_part

    @property
    def dropped(self) -> dict[str, int]:
        """Events lost by reason; the counters in the newest spool are newer than those in the metadata."""
        spools = sorted(self.path.glob("live-*.spool"))
        if spools:
            return {k: v for k, v in read_spool(spools[-1]).counters.items() if k.startswith("dropped_")}
        return self.metadata["counters"]["dropped"]

    def _table(self, table: str) -> pl.DataFrame:
        spools = {int(path.stem.split("-")[1]): path for path in self.path.glob("live-*.spool")}
        numbers = {int(path.stem.split("-")[1]) for path in self.path.glob("*-??????.parquet")} | set(spools)
        frames = []
        for number in sorted(numbers):
            part = self.path / part_name(table, number)
            if part.exists():
                frames.append(pl.read_parquet(part).with_columns(pl.col(pl.Categorical).cast(pl.String)))
            elif number in spools:
                frames.append(_frame(read_spool(spools[number]), table))
        return pl.concat(frames, how="vertical_relaxed")


def _frame(spool: Spool, table: str) -> pl.DataFrame:
    columns = spool.columns(table)
    frame = pl.DataFrame({name: values for name, (values, _) in columns.items()})
    for name, (_, missing) in columns.items():
        if missing is not None:
            frame = frame.with_columns(pl.when(~pl.Series(missing)).then(pl.col(name)).alias(name))
    if "op" in frame.columns:
        frame = frame.with_columns(pl.Series("op", [OPS[code] for code in frame["op"]], dtype=pl.String))
    return frame.select([column.name for column in TABLES[table]])


@dataclass(frozen=True)
class RunLog:
    """The folder of one run."""

    path: Path

    @property
    def ranks(self) -> dict[int, RankLog]:
        return {int(path.name.split("-")[1]): RankLog(path) for path in sorted(self.path.glob("rank-*"))}


@pytest.fixture(scope="session")
def read_runs() -> Callable[[Path], list[RunLog]]:
    """Reads the runs of a log folder, in the order in which they began."""

    def read(log_dir: Path) -> list[RunLog]:
        runs = [RunLog(path) for path in log_dir.iterdir() if path.is_dir()]
        return sorted(runs, key=lambda run: run.ranks[0].metadata["clock"]["anchor_epoch_ns"])

    return read


def environment(log_dir: Path | None, extra: dict[str, str] | None) -> dict[str, str]:
    """The environment of the tests without the collector's variables, then with those asked for."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DDPAN_")}
    kept["OMP_NUM_THREADS"] = "1"
    if log_dir is not None:
        kept["DDPAN_LOG_DIR"] = str(log_dir)
    return kept | (extra or {})


During = Callable[["subprocess.Popen[str]", Path], None]
"""What happens while a launch runs, given its process and the folder for files of the script's own."""


TORCH_ABORTS: Final = ("Resource deadlock avoided", "terminate called without an active exception")
"""What C++ says when torch ends a process group on one of the group's own threads, or a thread that nobody waited for.
It happens now and then on a busy machine, with the collector off as well, so one such end is no finding."""


def run_process(
    command: list[str],
    *,
    env: dict[str, str],
    out: Path,
    cwd: Path,
    timeout: float = 240,
    during: During | None = None,
) -> Outcome:
    """Run a command to its end, once more if torch aborted it."""
    outcome = run_once(command, env=env, out=out, cwd=cwd, timeout=timeout, during=during)
    if outcome.returncode == 0 or during is not None or not any(said in outcome.stderr for said in TORCH_ABORTS):
        return outcome
    print(f"started again, because torch aborted it: {command}\n{outcome.stderr}")  # noqa: T201 - pytest shows it
    for folder in (out, *((Path(env["DDPAN_LOG_DIR"]),) if "DDPAN_LOG_DIR" in env else ())):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
    return run_once(command, env=env, out=out, cwd=cwd, timeout=timeout, during=during)


def run_once(
    command: list[str],
    *,
    env: dict[str, str],
    out: Path,
    cwd: Path,
    timeout: float,
    during: During | None,
) -> Outcome:
    """Run a command to its end; when the time is over, it and all its children are killed."""
    process = subprocess.Popen(
        command, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        if during is not None:
            during(process, out)
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        pytest.fail(f"{command} took more than {timeout} s\n{stdout}\n{stderr}")
    return Outcome(process.returncode, stdout, stderr, out)


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """Starts a script of ``scripts/`` under torchrun, with a folder of its own as the first argument.

    ``prefix`` is a command that torchrun is started by.
    """

    def start(
        script: str,
        *arguments: str,
        ranks: int = 2,
        log_dir: Path | None = None,
        env: dict[str, str] | None = None,
        check: bool = True,
        prefix: Sequence[str] = (),
        during: During | None = None,
    ) -> Outcome:
        out = tmp_path_factory.mktemp(script)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [*prefix, *torchrun, str(SCRIPTS / f"{script}.py"), str(out), *arguments]
        outcome = run_process(command, env=environment(log_dir, env), out=out, cwd=out, during=during)
        if check:
            assert outcome.returncode == 0, outcome.stderr
        return outcome

    return start


@pytest.fixture(scope="session")
def unrecorded(launch: Callable[..., Outcome]) -> Callable[[int], Outcome]:
    """The trainings of ``configurations.py`` without the collector, by world size; each is run once."""
    known: dict[int, Outcome] = {}

    def train(ranks: int) -> Outcome:
        if ranks not in known:
            known[ranks] = launch("configurations", ranks=ranks)
        return known[ranks]

    return train


@pytest.fixture(scope="session")
def recorded(
    launch: Callable[..., Outcome],
    read_runs: Callable[[Path], list[RunLog]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[int], tuple[Outcome, RunLog]]:
    """The same trainings with the collector, and their log."""
    known: dict[int, tuple[Outcome, RunLog]] = {}

    def train(ranks: int) -> tuple[Outcome, RunLog]:
        if ranks not in known:
            logs = tmp_path_factory.mktemp("logs")
            outcome = launch("configurations", ranks=ranks, log_dir=logs)
            [run] = read_runs(logs)
            known[ranks] = outcome, run
        return known[ranks]

    return train


@pytest.fixture(scope="session")
def run_python(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """Starts a script of ``scripts/`` as one plain process."""

    def start(
        script: str,
        *arguments: str,
        log_dir: Path | None = None,
        env: dict[str, str] | None = None,
        timeout: float = 240,
    ) -> Outcome:
        out, cwd = tmp_path_factory.mktemp(script), tmp_path_factory.mktemp("cwd")
        command = [sys.executable, str(SCRIPTS / f"{script}.py"), str(out), *arguments]
        outcome = run_process(command, env=environment(log_dir, env), out=out, cwd=cwd, timeout=timeout)
        assert outcome.returncode == 0, outcome.stderr
        return outcome

    return start
