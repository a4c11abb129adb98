"""Trains until it is ended in the way that is asked for; each rank counts its finished steps in a file of its own."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BEFORE_THE_END = 150


def soon(end: Callable[[], object]) -> None:
    """End this process from the outside of what its main thread is doing, whatever that is."""

    def wait_and_end() -> None:
        time.sleep(random.uniform(0, 0.03))
        end()

    threading.Thread(target=wait_and_end).start()


def fail() -> None:
    raise ArithmeticError("the training has a mistake")


ENDINGS: dict[str, Callable[[], None]] = {
    "kill": lambda: soon(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "exit": lambda: soon(lambda: os._exit(3)),
    "raise": fail,
    "outside": lambda: None,
}
"""What rank 1 does; ``outside`` leaves it to others to end the training."""


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=150))
    rank = dist.get_rank()
    descriptor = os.open(Path(sys.argv[1], f"finished-{rank}"), os.O_RDWR | os.O_CREAT)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))), bucket_cap_mb=0.008)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(100_000):
        if rank == 1 and step == BEFORE_THE_END:
            ENDINGS[sys.argv[2]]()
        optimizer.zero_grad()
        model(torch.randn(2, 32)).square().mean().backward()
        optimizer.step()
        os.pwrite(descriptor, (step + 1).to_bytes(8, "little"), 0)


if __name__ == "__main__":
    main()
