"""The training behind `real_runs`: that of ``ddpan demo``, with one rank delayed in the steps that a plan names.

Like any user's script it knows nothing of the collector; torchrun starts it::

    DDPAN_LOG_DIR=logs torchrun --nproc-per-node 4 benchmarks/faulty_training.py --cause data --ranks 2 --from-step 60
"""

from __future__ import annotations

import argparse
import random
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ddpan.collector.demo_training import BATCH, BUCKET_CAP_MB, DelayedSGD, Model, Samples

DEVICE_SECONDS = 0.03
"""Pause in each forward that stands for a device at work: it leaves the cores that the ranks share idle for a while."""


def train(options: argparse.Namespace) -> None:
    """Train, each step with the delay that the plan has for this rank."""
    model = Model(forward_delay=DEVICE_SECONDS, backward_delay=0.0)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=BUCKET_CAP_MB)
    optimizer = DelayedSGD(wrapped.parameters(), lr=0.01)
    samples = Samples(options.steps * BATCH, delay=0.0)
    batches = iter(DataLoader(samples, batch_size=BATCH))
    delays = planned_delays(options)
    for seconds in delays:
        model.forward_delay = DEVICE_SECONDS + seconds * (options.cause == "forward")
        model.backward_delay = seconds * (options.cause == "backward")
        samples.delay = seconds * (options.cause == "data")
        optimizer.delay = seconds * (options.cause == "optimizer")
        time.sleep(seconds * (options.cause == "other"))
        batch = next(batches)
        optimizer.zero_grad()
        wrapped(batch).square().mean().backward()
        optimizer.step()


def planned_delays(options: argparse.Namespace) -> list[float]:
    """Seconds by which this rank is delayed in each step."""
    plan = random.Random(options.seed)  # the same on all ranks
    turns = [plan.choice(options.ranks) for _ in range(options.steps)]
    mine = [turn == dist.get_rank() for turn in turns]
    inside = range(options.from_step, options.to_step if options.to_step is not None else options.steps)
    return [options.delay_ms / 1000 * (mine[step] and step in inside) for step in range(options.steps)]


def main() -> None:
    """Train as the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cause", choices=("none", "data", "forward", "backward", "optimizer", "other"), default="none"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[0], help="the rank delayed; of several one in turn")
    parser.add_argument("--delay-ms", type=float, default=20.0)
    parser.add_argument("--from-step", type=int, default=0)
    parser.add_argument("--to-step", type=int)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
