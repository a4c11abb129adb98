"""What the collector costs: step time with and without it, in one run, in alternation.

Three trainings run side by side, two ranks each: one is recorded, switched on by the environment variable as users do
it, two are not. They take turns in random order, some steps each, while the other two wait: so all three see the same
changes in the speed of the machine, which are larger than what is measured. The first steps of a turn, which find the
caches full of the others' data, are not timed. Where a process has its memory makes a difference of its own, so all
are started anew several times. Printed is the median over turns of a ratio of step times: the recorded training to the
mean of the other two, and as a control one of these to the other, which should be 1. The intervals are bootstrap
intervals over starts and over turns within them. The processor time is that of all threads of all ranks in the timed
steps.

    python benchmarks/overhead.py                 both cases
    python benchmarks/overhead.py --case hard --starts 12 --turns 40
    python benchmarks/overhead.py --unrecorded    the collector on, and every step left out by DDPAN_STEPS
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS: Final = 2
WARM_UP: Final = 5
"""Steps until DDP has rebuilt its buckets."""


@dataclass(frozen=True)
class Case:
    """A model: ``layers`` square layers of ``width``, trained on ``batch`` rows; the bar for the upper bound."""

    layers: int
    width: int
    batch: int
    bucket_cap_mb: float | None
    untimed: int
    timed: int
    bar: float
    what: str


CASES = {
    "default": Case(6, 2048, 32, None, 1, 3, 1.01, "model of 100 MB, default buckets of 25 MiB"),
    "hard": Case(12, 512, 88, 1.0, 2, 8, 1.02, "12 buckets of 1 MiB"),
}

Measured = npt.NDArray[np.float64]
"""Step time, or processor time, in seconds: shape (starts, turns)."""


def rank_main(case: Case) -> None:
    """What each rank runs: a turn for each line that it reads, answered by its times in seconds."""
    # A core for each rank, on which the threads of training and of gloo take turns but do not interrupt each other: a
    # scheduler that moves threads about, or lets each wake-up preempt, makes more noise than what is measured.
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(os.environ["LOCAL_RANK"])]})
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    module = nn.Sequential(*(nn.Linear(case.width, case.width) for _ in range(case.layers)))
    model = DistributedDataParallel(module, bucket_cap_mb=case.bucket_cap_mb)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    inputs = torch.randn(case.batch, case.width)

    def train(steps: int) -> tuple[float, float]:
        began, busy = time.perf_counter(), time.process_time()
        for _ in range(steps):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        return (time.perf_counter() - began) / steps, (time.process_time() - busy) / steps

    train(WARM_UP)
    for _ in sys.stdin:
        train(case.untimed)
        print(json.dumps(train(case.timed)), flush=True)


class Training:
    """The ranks of one training, waiting for their turns; ``environment`` is added to the ranks'."""

    def __init__(self, case: str, environment: dict[str, str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {k: v for k, v in os.environ.items() if not k.startswith("DDPAN_")}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
        common |= {"OMP_NUM_THREADS": "1", **environment}
        self._ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", "--case", case],
                env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]

    def turn(self) -> tuple[float, float]:
        """Step time, and processor time of a step on all ranks, in seconds."""
        for rank in self._ranks:
            if rank.stdin is not None:
                rank.stdin.write("\n")
                rank.stdin.flush()
        lines = [rank.stdout.readline() for rank in self._ranks if rank.stdout is not None]
        if not all(lines):
            raise RuntimeError("a rank ended before its time; what it said is above")
        answers = [json.loads(line) for line in lines]
        return max(step for step, _ in answers), sum(busy for _, busy in answers)

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.communicate()


def one_start(case: str, environments: list[dict[str, str]], turns: int, order: random.Random) -> Measured:
    """Step times and processor times of trainings with these environments, shape (2, turns, trainings)."""
    measured = np.zeros((2, turns, len(environments)))
    with ExitStack() as stack:
        trainings = [stack.enter_context(Training(case, environment)) for environment in environments]
        for training in trainings:
            training.turn()
        for turn in range(turns):
            for k in order.sample(range(len(trainings)), len(trainings)):
                measured[:, turn, k] = trainings[k].turn()
    return measured


def interval(ratios: Measured, *, draws: int = 4_000) -> tuple[float, float, float]:
    """Median of all ratios and the 2.5 and 97.5 percentiles of its bootstrap over starts, and turns within."""
    random_ = np.random.default_rng(0)
    starts, turns = ratios.shape
    medians = np.empty(draws)
    for draw in range(draws):
        rows = random_.integers(starts, size=(starts, 1))
        medians[draw] = np.median(ratios[rows, random_.integers(turns, size=(starts, turns))])
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)


def measure(name: str, starts: int, turns: int, seed: int, *, steps: str) -> None:
    """Run one case and print its lines; ``steps`` is what is recorded."""
    case, order = CASES[name], random.Random(seed)
    measured = []
    for _ in range(starts):
        with tempfile.TemporaryDirectory() as folder:
            recorded = {"DDPAN_LOG_DIR": folder, "DDPAN_STEPS": steps, "DDPAN_QUIET": "1"}
            measured.append(one_start(name, [recorded, {}, {}], turns, order))
            if not any(Path(folder).iterdir()):
                raise RuntimeError("nothing was recorded: is ddpan installed for this interpreter?")
    (on, off, again), (busy_on, busy_off, busy_again) = np.array(measured).transpose(1, 3, 0, 2)
    middle, low, high = interval(2 * on / (off + again))
    verdict = "met" if high <= case.bar else "not met"
    print(
        f"{name}: {case.what}; step {np.median(off) * 1e3:.1f} ms, "
        f"{starts} starts of {turns} turns of {case.timed} steps\n"
        f"  step time, on / off        {middle:.4f} ({low:.4f} to {high:.4f}); upper bound {case.bar}: {verdict}\n"
        f"  step time, off / off       {_told(off / again)}\n"
        f"  processor time, on / off   {_told(2 * busy_on / (busy_off + busy_again))}\n"
        f"  processor time, off / off  {_told(busy_off / busy_again)}",
        flush=True,
    )


def _told(ratios: Measured) -> str:
    return "{:.4f} ({:.4f} to {:.4f})".format(*interval(ratios))


def main() -> None:
    """Measure the cases asked for; with ``--rank``, be one rank of one."""
    parser = argparse.ArgumentParser(description="Overhead of the collector, as a ratio of step times.")
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--starts", type=int, default=8)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--unrecorded", action="store_true", help="leave every step out with DDPAN_STEPS")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(CASES[options.case])
        return
    print(f"torch {torch.__version__}, {RANKS} ranks, gloo, one thread and one core each; in brackets 95 % intervals")
    for name in CASES if options.case == "all" else [options.case]:
        steps = "1000000:" if options.unrecorded else "0:"
        measure(name, options.starts, options.turns, options.seed, steps=steps)


if __name__ == "__main__":
    main()
