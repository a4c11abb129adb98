"""torch.compile around DDP and inside of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ._expect import check_buckets, check_steps, only
from ._mode import Mode, Run, Trained, World
from ._training import STEPS, WIDTH, batch, buckets_told, fit, sgd, wrap

__all__ = ["MODES"]


class Wide(nn.Module):
    """A model that fills several buckets of 1 MiB, the smallest that torch.compile cuts its graphs by.

    It has a forward of its own: with torch.compile around DDP, the forward of a ``Sequential`` would not be compiled.
    """

    def __init__(self) -> None:
        super().__init__()
        layers = [(WIDTH, 512), (512, 512), (512, 512), (512, WIDTH)]
        modules = [module for shape in layers for module in (nn.Linear(*shape), nn.ReLU())]
        self.body = nn.Sequential(*modules[:-1])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.body(inputs)
        return outputs


def around(**options: Any) -> Callable[[World], Trained]:
    """``torch.compile(DDP(model))``."""

    def train(_world: World) -> Trained:
        torch._dynamo.reset()
        ddp = wrap(Wide(), bucket_cap_mb=1)
        compiled: Any = torch.compile(ddp, **options)
        fit(compiled, sgd(ddp))
        return Trained([ddp], {**buckets_told(ddp), "graphs": graphs()})

    return train


def inside(**options: Any) -> Callable[[World], Trained]:
    """``DDP(torch.compile(model))``."""

    def train(_world: World) -> Trained:
        torch._dynamo.reset()
        inner: Any = torch.compile(Wide(), **options)
        ddp = wrap(inner, bucket_cap_mb=1)
        fit(ddp, sgd(ddp))
        return Trained([ddp], {**buckets_told(ddp), "graphs": graphs()})

    return train


def graphs() -> int:
    """Graphs that the compiler has made in this process: the collector must not cut any into pieces."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def expect_compiled(runs: list[Run]) -> None:
    for log in only(runs):
        check_steps(log)
        check_buckets(log, log.told)
        assert log.told["graphs"] > 0


def whole_step(_world: World) -> Trained:
    """A compiled function that calls DDP and computes the loss."""
    torch._dynamo.reset()
    ddp = wrap(Wide(), bucket_cap_mb=1)

    @torch.compile(backend="eager")
    def loss_of(inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = ddp(inputs).square().mean()
        return loss

    def learn(_: nn.Module) -> None:
        loss_of(batch()).backward()

    fit(ddp, sgd(ddp), learn=learn)
    return Trained([ddp], {**buckets_told(ddp), "graphs": graphs()})


@contextmanager
def python_reducer() -> Iterator[None]:
    """DDP's reducer written in Python, which the compiler sees through."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        yield


def python_reduced(_world: World) -> Trained:
    """The Python reducer: DDP's forward is compiled into one graph, its all-reduces into that of the backward."""
    with python_reducer():
        ddp = wrap(Wide(), bucket_cap_mb=1)
        compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
        optimizer = sgd(ddp)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = compiled(batch()).square().mean()
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
                loss.backward()
            optimizer.step()
    return Trained([ddp], {"graphs": graphs()})


def expect_python_reduced(runs: list[Run]) -> None:
    """DDP is not there when the compiled step runs: steps are told by the optimizer.

    The all-reduces, one for each parameter, are those of compiled code, which only hooks of the process group see. From
    the second step on, when the optimizer is known, they are its buckets.
    """
    for log in only(runs):
        seen = log.metadata["tap"] == "process_group_hooks"
        buckets = [log.buckets_of(0, step) for step in range(STEPS - 1)]
        assert [len(rows) for rows in buckets] == [0] + [8 * seen] * (STEPS - 2)
        assert sum(row["bytes"] for row in buckets[1]) == seen * log.metadata["modules"]["0"]["parameter_bytes"]


MODES = (
    Mode("torch.compile around DDP, eager", around(backend="eager"), expect_compiled, ranks=2),
    Mode("torch.compile around DDP, aot_eager", around(backend="aot_eager"), expect_compiled, ranks=2),
    Mode("torch.compile around DDP, inductor", around(), expect_compiled, ranks=2),
    Mode("torch.compile inside DDP, aot_eager", inside(backend="aot_eager"), expect_compiled, ranks=2),
    Mode("torch.compile of a function that calls DDP", whole_step, expect_compiled, ranks=2),
    Mode("torch.compile with the Python reducer", python_reduced, expect_python_reduced, ranks=2),
)
