"""What the collector costs: step time with and without it, in one run, in alternation.

Each rank holds two equal DDP models. Blocks of steps alternate, in random pairs, between the recorded model with the
collector started and the other with the collector stopped; so even a communication hook is there in one and not in the
other. Starting and stopping lie outside the timed steps. Printed is the median over pairs of the ratio of median step
times, with a bootstrap interval.

    python benchmarks/overhead.py                 both cases, 2 ranks
    python benchmarks/overhead.py --case hard --pairs 60
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
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


CASES = {
    "default": Case(6, 2048, 32, None, 6, 1.01, "model of 100 MB, default buckets of 25 MiB"),
    "hard": Case(12, 512, 80, 1.0, 10, 1.02, "12 buckets of 1 MiB"),
}


class Trainer:
    """One DDP model and its optimizer."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(case.width, case.width) for _ in range(case.layers)))
        self.model = DistributedDataParallel(layers, bucket_cap_mb=case.bucket_cap_mb)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.inputs = torch.randn(case.batch, case.width)

    def steps(self, count: int) -> list[float]:
        """Train ``count`` steps; seconds of each."""
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            self.optimizer.zero_grad()
            self.model(self.inputs).square().mean().backward()
            self.optimizer.step()
            seconds.append(time.perf_counter() - began)
        return seconds


def train(case: Case, pairs: int, seed: int, log_dir: str) -> list[tuple[float, float]]:
    """Median step time of each pair of blocks, with and without the collector, in seconds."""
    trainers = {False: Trainer(case), True: Trainer(case)}
    order = random.Random(seed)
    measured = []
    for pair in range(pairs + 1):
        medians = {}
        for recorded in order.sample([False, True], 2):
            if recorded:
                collector.start(log_dir)
            trainers[recorded].steps(3)
            dist.barrier()
            medians[recorded] = statistics.median(trainers[recorded].steps(case.steps))
            if recorded:
                collector.stop()
        if pair > 0:
            measured.append((medians[True], medians[False]))
    return measured


def interval(ratios: list[float], *, draws: int = 10_000) -> tuple[float, float, float]:
    """Median of ``ratios`` and the 2.5 and 97.5 percentiles of its bootstrap distribution."""
    drawn = np.random.default_rng(0).choice(np.array(ratios), (draws, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return statistics.median(ratios), float(low), float(high)


def rank_main(options: argparse.Namespace) -> None:
    """What each rank runs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        measured = train(CASES[options.case], options.pairs, options.seed, folder)
    if dist.get_rank() == 0:
        Path(options.result).write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def measure(name: str, pairs: int, seed: int) -> None:
    """Start the ranks for one case and print its line."""
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        options = ["--case", name, "--pairs", str(pairs), "--seed", str(seed), "--result", result.name]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "DDPAN_QUIET": "1"}
        environment.pop("DDPAN_LOG_DIR", None)
        subprocess.run([*launcher, *options], check=True, env=environment)
        measured = json.loads(Path(result.name).read_text())
    case = CASES[name]
    middle, low, high = interval([on / off for on, off in measured])
    off_ms = statistics.median(off for _, off in measured) * 1e3
    verdict = "met" if high <= case.bar else "not met"
    print(
        f"{name}: {case.what}, step {off_ms:.1f} ms, {len(measured)} pairs: "
        f"ratio {middle:.4f}, 95% interval {low:.4f} to {high:.4f}; bar {case.bar} for the upper bound {verdict}",
        flush=True,
    )


def main() -> None:
    """Measure the cases asked for; inside torchrun, be one rank of one."""
    parser = argparse.ArgumentParser(description="Overhead of the collector, as a ratio of step times.")
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--pairs", type=int, default=80)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.result:
        rank_main(options)
        return
    print(f"torch {torch.__version__}, 2 ranks, gloo, one thread each")
    for name in CASES if options.case == "all" else [options.case]:
        measure(name, options.pairs, options.seed)


if __name__ == "__main__":
    main()
