"""Trains every configuration for 50 steps and writes a hash of the parameters after each."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 50
WIDTHS = (20, 48, 33, 7)


class Model(nn.Sequential):
    def __init__(self) -> None:
        layers = [
            layer
            for fan_in, fan_out in itertools.pairwise(WIDTHS)
            for layer in (nn.Linear(fan_in, fan_out), nn.LayerNorm(fan_out), nn.Tanh())
        ]
        super().__init__(*layers)


def train(dtype: torch.dtype, *, as_view: bool, set_to_none: bool) -> str:
    torch.manual_seed(0)
    model = DistributedDataParallel(Model().to(dtype), bucket_cap_mb=0.003, gradient_as_bucket_view=as_view)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        model(torch.randn(6, WIDTHS[0], dtype=dtype)).square().sum().backward()
        optimizer.step()
    content = b"".join(p.detach().view(torch.uint8).numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(content).hexdigest()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    hashes = {}
    for dtype, as_view, set_to_none in itertools.product((torch.float32, torch.bfloat16), (False, True), (False, True)):
        name = f"{str(dtype).removeprefix('torch.')}, as_view={as_view}, set_to_none={set_to_none}"
        hashes[name] = train(dtype, as_view=as_view, set_to_none=set_to_none)
    Path(sys.argv[1], f"facts-{dist.get_rank()}.json").write_text(json.dumps(hashes))
    # Gloo's threads may still be letting go of their last work; an interpreter that ends meanwhile aborts in torch.
    time.sleep(0.2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
