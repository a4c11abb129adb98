"""What the collector costs: step time with and without it, in one run, in alternation.

Blocks of steps follow each other in random order, three to a round: one with the collector on, two with it off. All
train the same module. Each block wraps it in a DDP of its own, so that a communication hook, which no reducer gives
back, is there in one and not in the next; wrapping, starting, stopping and the steps in which buckets are rebuilt are
not timed. Printed is the median over rounds of a ratio of mean step times, with a bootstrap interval: the block with
the collector to the mean of the two without, and as a control one without to the other, which should be 1. The same for
the processor time of all threads of the process, which varies less than the time that two ranks wait for each other.

    python benchmarks/overhead.py                 both cases, 2 ranks
    python benchmarks/overhead.py --case hard --rounds 60
    python benchmarks/overhead.py --unrecorded    the collector on, and every step left out by DDPAN_STEPS
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpan import collector


@dataclass(frozen=True)
class Case:
    """A model: ``layers`` square layers of ``width``, trained on ``batch`` rows; the bar for the upper bound."""

    layers: int
    width: int
    batch: int
    bucket_cap_mb: float | None
    steps: int
    bar: float
    what: str


WARM_UP = 3
"""Steps until DDP has rebuilt its buckets and both sides are as warm."""

CASES = {
    "default": Case(6, 2048, 32, None, 8, 1.01, "model of 100 MB, default buckets of 25 MiB"),
    "hard": Case(12, 512, 72, 1.0, 30, 1.02, "12 buckets of 1 MiB"),
}


class Trainer:
    """One module and its optimizer, wrapped in a new DDP for each block of steps."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self._case = case
        self._module = nn.Sequential(*(nn.Linear(case.width, case.width) for _ in range(case.layers)))
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=1e-4)
        self._inputs = torch.randn(case.batch, case.width)

    def block(self, log_dir: str | None) -> tuple[float, float]:
        """Mean step time and processor time of a step in seconds, recorded where there is a ``log_dir``."""
        if log_dir is not None:
            collector.start(log_dir)
        model = DistributedDataParallel(self._module, bucket_cap_mb=self._case.bucket_cap_mb)
        for _ in range(WARM_UP):
            self._step(model)
        gc.collect()
        dist.barrier()
        began, busy = time.perf_counter(), time.process_time()
        for _ in range(self._case.steps):
            self._step(model)
        ended, busy = time.perf_counter(), time.process_time() - busy
        dist.barrier()
        if log_dir is not None:
            collector.stop()
        return (ended - began) / self._case.steps, busy / self._case.steps

    def _step(self, model: nn.Module) -> None:
        self._optimizer.zero_grad()
        model(self._inputs).square().mean().backward()
        self._optimizer.step()


def train(case: Case, rounds: int, seed: int, log_dir: str) -> list[list[tuple[float, float]]]:
    """Step time and processor time of each round's blocks: with the collector, without, and without."""
    trainer = Trainer(case)
    order = random.Random(seed)
    measured = []
    for _ in range(rounds + 1):
        blocks = [(0.0, 0.0)] * 3
        for place in order.sample(range(3), 3):
            blocks[place] = trainer.block(log_dir if place == 0 else None)
        measured.append(blocks)
    return measured[1:]


def interval(ratios: npt.NDArray[np.float64], *, draws: int = 10_000) -> tuple[float, float, float]:
    """Median of ``ratios`` and the 2.5 and 97.5 percentiles of its bootstrap distribution."""
    drawn = np.random.default_rng(0).choice(ratios, (draws, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)


def rank_main(options: argparse.Namespace) -> None:
    """What each rank runs."""
    # A core for each rank: a scheduler that moves threads about makes more noise than what is measured.
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(os.environ["LOCAL_RANK"])]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        measured = train(CASES[options.case], options.rounds, options.seed, folder)
    if dist.get_rank() == 0:
        Path(options.result).write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def measure(name: str, rounds: int, seed: int, *, steps: str) -> None:
    """Start the ranks for one case and print its lines; ``steps`` is what is recorded of each block."""
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        options = ["--case", name, "--rounds", str(rounds), "--seed", str(seed), "--result", result.name]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "DDPAN_QUIET": "1", "DDPAN_STEPS": steps}
        environment.pop("DDPAN_LOG_DIR", None)
        subprocess.run([*launcher, *options], check=True, env=environment)
        measured = json.loads(Path(result.name).read_text())
    case = CASES[name]
    (on, busy_on), (off, busy_off), (again, busy_again) = np.array(measured).transpose(1, 2, 0)
    middle, low, high = interval(2 * on / (off + again))
    verdict = "met" if high <= case.bar else "not met"
    print(
        f"{name}: {case.what}; step {np.median(off) * 1e3:.1f} ms, {len(on)} rounds of 3 blocks of {case.steps} steps\n"
        f"  step time, on / off        {middle:.4f} ({low:.4f} to {high:.4f}); upper bound {case.bar}: {verdict}\n"
        f"  step time, off / off       {_told(off / again)}\n"
        f"  processor time, on / off   {_told(2 * busy_on / (busy_off + busy_again))}\n"
        f"  processor time, off / off  {_told(busy_off / busy_again)}",
        flush=True,
    )


def _told(ratios: npt.NDArray[np.float64]) -> str:
    return "{:.4f} ({:.4f} to {:.4f})".format(*interval(ratios))


def main() -> None:
    """Measure the cases asked for; inside torchrun, be one rank of one."""
    parser = argparse.ArgumentParser(description="Overhead of the collector, as a ratio of step times.")
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--unrecorded", action="store_true", help="leave every step out with DDPAN_STEPS")
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.result:
        rank_main(options)
        return
    print(f"torch {torch.__version__}, 2 ranks, gloo, one thread and one core each; in brackets 95 % intervals")
    for name in CASES if options.case == "all" else [options.case]:
        measure(name, options.rounds, options.seed, steps="1000000:" if options.unrecorded else "0:")


if __name__ == "__main__":
    main()
