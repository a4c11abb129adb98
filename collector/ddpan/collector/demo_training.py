"""The training that ``ddpan demo`` starts: plain DDP on generated data, with a fault in one rank.

It is a user's script like any other and knows nothing of the collector; torchrun starts it::

    DDPAN_LOG_DIR=logs torchrun --nproc-per-node 4 -m ddpan.collector.demo_training --fault backward --rank 2
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

__all__ = ["FAULTS", "main"]

FAULTS: Final = ("none", "data", "forward", "backward", "optimizer")
WIDTH: Final = 128
LAYERS: Final = 8
BATCH: Final = 16
BUCKET_CAP_MB: Final = 0.0625


class _SleepInBackward(torch.autograd.Function):
    """The identity, which takes its time on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


delayed_backward: Callable[[torch.Tensor, float], torch.Tensor] = _SleepInBackward.apply
"""Its input, whose gradient comes ``seconds`` late."""


class Model(nn.Module):
    """A stack of linear layers; a delay sits before its middle layer."""

    def __init__(self, *, forward_delay: float, backward_delay: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.forward_delay = forward_delay
        self.backward_delay = backward_delay

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers to ``x``, shape (batch, width)."""
        for number, layer in enumerate(self.layers):
            if number == LAYERS // 2:
                time.sleep(self.forward_delay)
                if self.backward_delay:
                    x = delayed_backward(x, self.backward_delay)
            x = torch.relu(layer(x))
        return x


class Samples(Dataset[torch.Tensor]):
    """Random samples; the first of each batch takes ``delay`` seconds to load."""

    def __init__(self, size: int, *, delay: float) -> None:
        self.size = size
        self.delay = delay

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.size:
            raise IndexError(index)
        if index % BATCH == 0:
            time.sleep(self.delay)
        return torch.randn(WIDTH)


class DelayedSGD(torch.optim.SGD):
    """SGD whose step takes ``delay`` seconds longer."""

    delay = 0.0

    def step(self, closure: Any = None) -> Any:
        """Step, late."""
        time.sleep(self.delay)
        return super().step(closure)


def main() -> None:
    """Train for the number of steps that the command line asks for."""
    options = _options()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    delays = dict.fromkeys(FAULTS, 0.0)
    if dist.get_rank() == options.rank:
        delays[options.fault] = options.delay_ms / 1000
    _train(options.steps, delays)
    dist.destroy_process_group()


def _train(steps: int, delays: dict[str, float]) -> None:
    model = DistributedDataParallel(
        Model(forward_delay=delays["forward"], backward_delay=delays["backward"]), bucket_cap_mb=BUCKET_CAP_MB
    )
    optimizer = DelayedSGD(model.parameters(), lr=0.01)
    optimizer.delay = delays["optimizer"]
    for batch in DataLoader(Samples(steps * BATCH, delay=delays["data"]), batch_size=BATCH):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A small DDP training with a fault in one rank.")
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--rank", type=int, default=0, help="the rank that has the fault")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="length of the fault in each step")
    parser.add_argument("--steps", type=int, default=150)
    return parser.parse_args()


if __name__ == "__main__":
    main()
