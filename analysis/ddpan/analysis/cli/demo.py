"""``ddpan demo``: a real training on this machine, recorded and diagnosed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import click

from ddpan import analysis
from ddpan.analysis.errors import UsageError
from ddpan.analysis.reports import console

from ._output import emit
from ._terminal import terminal_for

__all__ = ["command"]

_FAULTS: Final = ("none", "data", "forward", "backward", "optimizer")
_TRAINING: Final = "ddpan.collector.demo_training"

_EPILOG: Final = """\b
Example:
  ddpan demo
  ddpan demo --fault data --rank 1 --delay-ms 30
"""


@click.command("demo", epilog=_EPILOG, short_help="Record and diagnose a real training on this machine.")
@click.option(
    "--fault", type=click.Choice(_FAULTS), default="backward", show_default=True, help="Where one rank waits."
)
@click.option("--rank", type=click.IntRange(0), default=2, show_default=True, help="The rank that waits.")
@click.option("--delay-ms", type=click.FloatRange(0.0), default=20.0, show_default=True, help="How long, in each step.")
@click.option("--steps", type=click.IntRange(1), default=200, show_default=True, help="Steps to train.")
@click.option("--ranks", type=click.IntRange(1, 64), default=4, show_default=True, help="Processes to train with.")
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("ddpan-demo-logs"),
    show_default=True,
    help="Folder for the log.",
)
def command(*, fault: str, rank: int, delay_ms: float, steps: int, ranks: int, log_dir: Path) -> None:
    """Train a small model on this machine with one slow rank, record it, and say who was slow.

    The training is real: torchrun, DDP and gloo, one thread for each rank. Needs torch.
    """
    if fault != "none" and rank >= ranks:
        raise UsageError(f"--rank {rank} does not exist among {ranks} ranks: choose 0 to {ranks - 1}, or raise --ranks")
    if importlib.util.find_spec("torch") is None:
        raise UsageError("ddpan demo trains a model and needs torch: pip install 'ddpan[collector]'")
    folder = _fresh_folder(log_dir)
    told = "no fault" if fault == "none" else f"{delay_ms:g} ms of delay in the {fault} of rank {rank}"
    click.echo(f"Training on {ranks} ranks for {steps} steps, with {told} ...", err=True)
    began = time.monotonic()
    _train(folder, ranks, ["--fault", fault, "--rank", str(rank), "--delay-ms", str(delay_ms), "--steps", str(steps)])
    click.echo(f"Trained in {time.monotonic() - began:.0f} s.\n", err=True)
    summary = analysis.summarize(analysis.load(folder))
    emit(console.render(summary, terminal=terminal_for(None)), None)
    found = summary.stragglers.verdict.reason
    click.echo(f"\nThe demo put in {told}.\nddpan found: {found}")
    click.echo(f"The log is in {folder}; read it again with: ddpan summarize {folder}")


def _fresh_folder(log_dir: Path) -> Path:
    """A folder of this demo's own inside ``log_dir``, so that runs of several demos do not mix."""
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%dT%H%M%S-"), dir=log_dir))
    except OSError as error:
        raise UsageError(f"cannot write {log_dir}: {error.strerror}; choose another --log-dir") from error


def _train(folder: Path, ranks: int, options: list[str]) -> None:
    """Run the training as a user would, switched on by the variable alone.

    Raises:
        UsageError: the training failed; its last lines are in the message.
    """
    environment = os.environ | {"DDPAN_LOG_DIR": str(folder), "DDPAN_QUIET": "1", "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*launcher, "-m", _TRAINING, *options], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise UsageError(
            f"the training failed with exit code {done.returncode}: {' '.join(done.stderr[-2000:].split())}"
        )
