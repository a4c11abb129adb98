"""Small models, and loops that train them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["CAP_MB", "STEPS", "WIDTH", "Net", "backward", "batch", "buckets_told", "fit", "sgd", "wrap"]

STEPS: Final = 6
WIDTH: Final = 32
CAP_MB: Final = 0.008
"""Two layers of a `Net` in one bucket."""


class Net(nn.Sequential):
    """``layers`` linear layers, each of another size, with ReLU between them; input of shape (batch, WIDTH)."""

    def __init__(self, layers: int = 6) -> None:
        widths = [WIDTH, *(WIDTH + number for number in range(1, layers))]
        shapes = zip(widths, [*widths[1:], WIDTH], strict=True)
        modules = [module for shape in shapes for module in (nn.Linear(*shape), nn.ReLU())]
        super().__init__(*modules[:-1])


def wrap(module: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    """DDP around ``module``, or a fresh `Net`, with buckets of `CAP_MB` unless ``options`` say otherwise."""
    if "bucket_cap_mb_list" not in options:
        options.setdefault("bucket_cap_mb", CAP_MB)
    return DistributedDataParallel(Net() if module is None else module, **options)


def sgd(*modules: nn.Module) -> torch.optim.SGD:
    """An optimizer for all parameters of ``modules``."""
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.05, momentum=0.9)


def batch() -> torch.Tensor:
    """A batch, different on each rank and each time."""
    return torch.randn(4, WIDTH)


def backward(ddp: nn.Module, inputs: torch.Tensor | None = None) -> None:
    """One forward and one backward."""
    ddp(batch() if inputs is None else inputs).square().mean().backward()


def fit(
    ddp: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = STEPS,
    *,
    set_to_none: bool = True,
    learn: Callable[[nn.Module], None] = backward,
) -> None:
    """Train for ``steps`` steps; ``learn`` does a step's forward and backward."""
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        learn(ddp)
        optimizer.step()


def buckets_told(ddp: DistributedDataParallel) -> dict[str, list[int]]:
    """Bytes of the first and of the rebuilt buckets, as DDP's own logging data has them after three steps."""
    told = ddp._get_ddp_logging_data()
    return {kind: _sizes(str(told.get(key, ""))) for kind, key in _TOLD.items()}


_TOLD: Final = {"first": "bucket_sizes", "rebuilt": "rebuilt_bucket_sizes"}


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",") if size.strip()]
