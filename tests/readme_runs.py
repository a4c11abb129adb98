"""The runs whose answers the README quotes; run as a program, it prints what belongs there.

python tests/readme_runs.py
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from ddpan.analysis import Run, load, summarize
from ddpan.analysis.reports._answer import answer
from ddpan.analysis.testing import Fault, Scenario, open_run, simulate

__all__ = ["ANSWER_LINES", "RUNS", "quoted"]

ANSWER_LINES: Final = 3
"""Lines of each answer that are quoted."""

_FIXTURES: Final = Path(__file__).parents[1] / "fixtures"
_MS: Final = 1_000_000
_STEPS: Final = 600
_WIDTH: Final = 120


def _on_gpus(*faults: Fault) -> Run:
    """A simulated run of eight GPUs on two hosts."""
    run = simulate(
        Scenario(ranks=8, ranks_per_host=4, steps=_STEPS, noise=0.05, transfer_noise=0.3, faults=faults, seed=3)
    )
    for metadata in run.metadata.values():
        metadata["device"], metadata["backend"] = "cuda", "nccl"
    return open_run(run)


def _onset() -> Run:
    return _on_gpus(Fault(rank=5, cause="data", delay_ns=25 * _MS, first_step=350))


def _rotating() -> Run:
    turns = np.random.default_rng(0).integers(8, size=_STEPS).tolist()
    faults = (
        Fault(rank=rank, cause="forward", delay_ns=25 * _MS, first_step=step, end_step=step + 1)
        for step, rank in enumerate(turns)
    )
    return _on_gpus(*faults)


def _network() -> Run:
    return _on_gpus(Fault(rank=0, cause="collective", delay_ns=18 * _MS, first_step=400))


def _without_rank_3() -> Run:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(_FIXTURES / "healthy", Path(folder) / "logs", ignore=shutil.ignore_patterns("rank-00003"))
        run = load(Path(folder) / "logs")
        summarize(run)  # which reads all that it needs while the files are there
        return run


RUNS: Final[dict[str, Callable[[], Run]]] = {
    "One rank is slow in every step (a real run on four CPU ranks):": lambda: load(_FIXTURES / "slow-backward"),
    "One rank becomes slow during the run (simulated, eight GPUs):": _onset,
    "Each time another rank is slow (simulated):": _rotating,
    "The network becomes slow, for all ranks alike (simulated):": _network,
    "Nobody is slow (a real run):": lambda: load(_FIXTURES / "healthy"),
    "One rank left no log, so nobody can be cleared (the same run without rank 3):": _without_rank_3,
}
"""What each run is, in the words of the README, and how to open it."""


def quoted(run: Run) -> str:
    """The first lines of the answer on ``run`` as the README shows them."""
    lines = answer(summarize(run))[:ANSWER_LINES]
    return "\n".join(textwrap.fill(line, _WIDTH, initial_indent="    ", subsequent_indent="    ") for line in lines)


if __name__ == "__main__":
    for title, opened in RUNS.items():
        sys.stdout.write(f"{title}\n\n{quoted(opened())}\n\n")
