"""DDP on one GPU, whose work is slow in the middle of the backward; asks what the host did to the device meanwhile.

Arguments: folder, backend.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

STEPS = 12
WIDTH = 64
DELAY_NS = 20_000_000
SYNCHRONIZING = ("Synchronize", "cudaMemcpy")
"""What calls of the CUDA runtime that wait for the device have in their names, other than those that end in Async."""


class BusyDevice(torch.autograd.Function):
    """Does nothing, but its backward keeps the device busy. The host goes on at once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cycles: int) -> torch.Tensor:
        ctx.cycles = cycles
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        torch.cuda._sleep(ctx.cycles)
        return gradient, None


class Layers(nn.Module):
    def __init__(self, cycles: int) -> None:
        super().__init__()
        self.cycles = cycles
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = BusyDevice.apply(self.middle(torch.relu(self.first(x))), self.cycles)  # type: ignore[no-untyped-call]
        result: torch.Tensor = self.last(torch.relu(x))
        return result


def cycles_of_delay() -> int:
    """Cycles of the device that take as long as the delay."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)
    began.record()
    torch.cuda._sleep(10_000_000)
    ended.record()
    torch.cuda.synchronize()
    return int(10_000_000 * DELAY_NS / (began.elapsed_time(ended) * 1e6))


def waits(profiled: Any) -> dict[str, int]:
    """How often each call that waits for the device was made."""
    names = (event.name for event in profiled.events() if any(part in event.name for part in SYNCHRONIZING))
    return dict(Counter(name for name in names if not name.endswith("Async")))


def main() -> None:
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    dist.init_process_group(sys.argv[2])
    model = DistributedDataParallel(Layers(cycles_of_delay()).cuda(), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(STEPS, 8, WIDTH, device="cuda")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for batch in inputs:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    content = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    facts = {"hash": hashlib.sha256(content).hexdigest(), "waits": waits(profiled)}
    Path(sys.argv[1], f"facts-{dist.get_rank()}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
