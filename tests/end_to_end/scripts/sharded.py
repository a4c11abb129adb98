"""Trainings without DDP: FSDP2 with gradient accumulation, and gradients reduced by hand."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

WIDTH = 32
LAYERS = 3
STEPS = 4
MICRO_BATCHES = 2
SLOW_STEPS = 40
SLOW_RANK = 1
DELAY_SECONDS = 0.04
DEVICE_SECONDS = 0.004


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.linear:
            x = torch.relu(layer(x))
        return x


def digest(parameters: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in parameters)).hexdigest()


def sharded() -> str:
    model = Layers()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.linear:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            model.set_requires_gradient_sync(micro_batch == MICRO_BATCHES - 1)
            model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(torch.randn(4, WIDTH))
    return digest([p.full_tensor() for p in model.parameters()])  # type: ignore[attr-defined]


def by_hand() -> str:
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        model(torch.randn(4, WIDTH)).square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    return digest(list(model.parameters()))


def by_hand_slow() -> str:
    """Longer, with a rank whose computation takes its time, and a metric that is averaged now and then."""
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(SLOW_STEPS):
        time.sleep(DEVICE_SECONDS)
        loss = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        if dist.get_rank() == SLOW_RANK:
            time.sleep(DELAY_SECONDS)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            dist.all_reduce(loss.detach())
    return digest(list(model.parameters()))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digest_of = {"sharded": sharded, "by_hand": by_hand, "by_hand_slow": by_hand_slow}[sys.argv[2]]()
    Path(sys.argv[1], f"facts-{dist.get_rank()}.json").write_text(json.dumps(digest_of))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
