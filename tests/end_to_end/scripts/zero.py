"""DeepSpeed trainings one after the other in one process group, each of a few steps: ZeRO 0 to 3 and their options."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

WIDTH = 32
LAYERS = 6
BUCKET_ELEMENTS = 2 * WIDTH * (WIDTH + 1)
DELAY_SECONDS = 0.02
DEVICE_SECONDS = 0.004
SLOW_RANK = 2
LATE_LAYER = 2

# name: (stage of ZeRO, overlap_comm, micro-batches)
CONFIGURATIONS = {
    "zero0": (0, False, 1),
    "zero0_overlap": (0, True, 2),
    "zero1": (1, False, 2),
    "zero1_overlap": (1, True, 1),
    "zero2": (2, False, 2),
    "zero2_overlap": (2, True, 1),
    "zero3": (3, False, 2),
    "zero3_overlap": (3, True, 1),
}
SLOW = {"zero1": (1, False, 1), "zero2": (2, True, 1), "zero3": (3, False, 1)}


class Late(torch.autograd.Function):
    """Does nothing, but on one rank takes its time for it in the backward."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == SLOW_RANK:
            time.sleep(DELAY_SECONDS)
        return gradient


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(DEVICE_SECONDS)
        for place, layer in enumerate(self.linear):
            x = torch.relu(layer(x))
            if place == LATE_LAYER:
                x = Late.apply(x)  # type: ignore[no-untyped-call]
        return x


def settings(stage: int, overlap: bool, micro_batches: int) -> dict[str, Any]:
    zero = {"stage": stage, "overlap_comm": overlap, "reduce_bucket_size": BUCKET_ELEMENTS}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": BUCKET_ELEMENTS}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": zero,
        "comms_logger": {"enabled": os.environ.get("COMMS_LOGGER") == "1", "prof_all": True, "verbose": False},
    }


def train(configuration: tuple[int, bool, int], steps: int) -> str:
    """Train for some steps; a hash of the parameters."""
    torch.manual_seed(0)
    model = Layers()
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.ndim == n]} for n in (2, 1)]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=settings(*configuration))
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(steps * configuration[2]):
        loss = engine(torch.randn(4, WIDTH)).square().mean()
        engine.backward(loss)
        engine.step()
    with deepspeed.zero.GatheredParameters(parameters, enabled=configuration[0] == 3):
        content = b"".join(p.detach().numpy().tobytes() for p in engine.module.parameters())
    engine.destroy()
    return hashlib.sha256(content).hexdigest()


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    steps = int(sys.argv[3])
    configurations = {"all": CONFIGURATIONS, "slow": SLOW}[sys.argv[2]]
    facts: dict[str, Any] = {"hashes": {name: train(one, steps) for name, one in configurations.items()}}
    if deepspeed.comm.comm.comms_logger.enabled:
        logger = deepspeed.comm.comm.comms_logger
        facts["logger"] = {
            op: {size: values[:2] for size, values in of.items()} for op, of in logger.comms_dict.items()
        }
    Path(sys.argv[1], f"facts-{dist.get_rank()}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
