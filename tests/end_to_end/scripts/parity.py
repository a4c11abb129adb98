"""Two trainings that ask DDP's own logger in each iteration what it measured."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 45
WINDOWS = ("forward_compute", "backward_compute", "backward_comm", "backward_compute_comm_overlap")


class Sleep(torch.autograd.Function):
    """The identity, slow on the way there and back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: float, back: float) -> torch.Tensor:
        ctx.back = back
        time.sleep(there)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.back)
        return gradients[0], None, None


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))
        self.sleep = (0.0, 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number % 3 == 1:
                x = Sleep.apply(x, *self.sleep)  # type: ignore[no-untyped-call]  # torch has no types here
            x = torch.relu(layer(x))
        return x


class Varying(Layers):
    """Each step sleeps for another time."""


class Interrupted(Layers):
    """Some forwards have no backward."""


def measured(model: DistributedDataParallel) -> dict[str, int]:
    told = model._get_ddp_logging_data()
    names = [f"{prefix}{window}_time" for prefix in ("", "avg_") for window in WINDOWS]
    return {name: int(told.get(name, 0)) for name in names}


def made(kind: type[Layers]) -> DistributedDataParallel:
    model = DistributedDataParallel(kind(), bucket_cap_mb=0.5)
    model._set_ddp_runtime_logging_sample_rate(1)
    return model


def vary() -> list[dict[str, int]]:
    """What the logger said after each forward, and after one more forward at the end."""
    model = made(Varying)
    x = torch.randn(16, 256)
    said = []
    for step in range(STEPS):
        model.module.sleep = (0.004 * (step % 3), 0.003 * (step % 2) + 0.002)
        loss = model(x).square().mean()
        said.append(measured(model))
        loss.backward()
    model(x)
    said.append(measured(model))
    return said


def interrupt() -> list[dict[str, int]]:
    """Two slow steps, six forwards without a backward, two fast steps, and one more forward."""
    model = made(Interrupted)
    x = torch.randn(16, 256)
    said = []
    for back, backward in [(0.02, True)] * 2 + [(0.02, False)] * 6 + [(0.0, True)] * 2:
        model.module.sleep = (0.001, back)
        loss = model(x).square().mean()
        said.append(measured(model))
        if backward:
            loss.backward()
    model(x)
    said.append(measured(model))
    return said


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    facts = {"Varying": vary(), "Interrupted": interrupt()}
    Path(sys.argv[1], f"facts-{dist.get_rank()}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
