"""What is done to the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from ._expect import check_backward, check_buckets, check_steps, only
from ._mode import Mode, Run, Trained, World
from ._training import STEPS, WIDTH, Net, backward, batch, buckets_told, fit, sgd, wrap

__all__ = ["MODES"]


class Checkpointed(nn.Module):
    """Two halves whose activations are computed again in the backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = Net(4), Net(5)
        self.reentrant = reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for half in (self.first, self.second):
            inputs = checkpoint(half, inputs, use_reentrant=self.reentrant)
        return inputs


def checkpointed(*, reentrant: bool, **options: Any) -> Callable[[World], Trained]:
    """Activation checkpointing of both halves of the model."""

    def train(_world: World) -> Trained:
        ddp = wrap(Checkpointed(reentrant=reentrant), **options)

        def learn(_: nn.Module) -> None:
            backward(ddp, batch().requires_grad_())

        fit(ddp, sgd(ddp), learn=learn)
        return Trained([ddp], buckets_told(ddp))

    return train


def expect_regular(rebuilt_at: int | None = 1, *, optimizer: bool = True) -> Callable[[list[Run]], None]:
    """As a plain training."""

    def check(runs: list[Run]) -> None:
        for log in only(runs):
            check_steps(log, optimizer=optimizer)
            check_buckets(log, log.told, rebuilt_at=rebuilt_at)

    return check


class Stream:
    """Stands in for a stream or an event of an accelerator where there is none: everything is done at once."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def wait(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, *_: object) -> None: ...


@contextmanager
def streams() -> Iterator[None]:
    """Let DDP have the streams that it asks for, also on a machine that has none."""
    with (
        mock.patch.object(torch, "Stream", Stream),
        mock.patch.object(torch, "Event", Stream),
        mock.patch.object(torch.accelerator, "current_stream", Stream),
    ):
        yield


def mixed_precision(_world: World) -> Trained:
    """DDP's own mixed precision: parameters and gradients in bfloat16, the optimizer in float32.

    The first gradients are not used: before the buckets are rebuilt, DDP on a CPU reduces memory that it has not set.
    """
    with streams():
        ddp = wrap(mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16))
        optimizer = sgd(ddp)
        backward(ddp)
        fit(ddp, optimizer, STEPS - 1)
    return Trained([ddp], buckets_told(ddp))


def expect_mixed_precision(runs: list[Run]) -> None:
    """DDP's own hook is seen like a user's; the gradients on the wire have half of the bytes."""
    for log in only(runs):
        check_backward(log.steps[0], optimizer=False)
        check_steps(replace(log, steps=log.steps[1:]), first=1, steps=STEPS - 1)
        check_buckets(log, log.told, exact_bytes=False)
        assert log.metadata["modules"]["0"]["comm_hook"] == "_reducer_allreduce_and_upcast_hook"


def in_backward(_world: World) -> Trained:
    """Each parameter has an optimizer of its own, which steps as soon as its gradient is reduced."""
    # Imported here, since torch itself imports what it deprecates along with it.
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

    net = Net()
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.05})
    with streams():
        ddp = wrap(net)
        for _ in range(STEPS):
            backward(ddp)
    return Trained([ddp], buckets_told(ddp))


def expect_in_backward(runs: list[Run]) -> None:
    """The optimizer begins and ends within the backward."""
    for log in only(runs):
        assert [(row["step"], row["micro_batch"], row["synced"]) for row in log.steps] == [
            (step, 0, True) for step in range(STEPS)
        ]
        check_buckets(log, log.told)
        for row in log.steps:
            check_backward(row, optimizer=False)
            assert row["forward_end_ns"] < row["optimizer_start_ns"] < row["optimizer_end_ns"] < row["backward_end_ns"]


class Power(nn.Module):
    """A single parameter: with more of them in a bucket DDP itself fails on a backward with ``create_graph=True``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.weight.pow(3) * inputs


def create_graph(_world: World) -> Trained:
    """A backward that could itself be differentiated, which DDP lets nobody do after the first step."""
    ddp = wrap(Power())

    def learn(_: nn.Module) -> None:
        ddp(batch()).square().mean().backward(create_graph=True)
        ddp.module.weight.grad = ddp.module.weight.grad.detach()

    fit(ddp, sgd(ddp), learn=learn)
    return Trained([ddp], {**buckets_told(ddp), "fails": why_create_graph_fails()})


def penalty(_world: World) -> Trained:
    """A penalty on the gradient by the inputs, which is differentiated as part of the loss."""
    ddp = wrap()

    def learn(_: nn.Module) -> None:
        inputs = batch().requires_grad_()
        loss = ddp(inputs).square().mean()
        [gradient] = torch.autograd.grad(loss, [inputs], create_graph=True)
        (loss + (gradient.norm(dim=1) - 1).square().mean()).backward()

    fit(ddp, sgd(ddp), learn=learn)
    return Trained([ddp], buckets_told(ddp))


def why_create_graph_fails() -> str:
    """What DDP says to ``create_graph=True`` with two parameters in a bucket."""
    ddp = wrap(nn.Linear(WIDTH, 3))
    try:
        ddp(batch()).square().mean().backward(create_graph=True)
    except RuntimeError as error:
        return str(error)
    return ""


def expect_create_graph(runs: list[Run]) -> None:
    for log in only(runs):
        check_steps(log)
        check_buckets(log, log.told)


def retained(_world: World) -> Trained:
    """Two backwards through one graph: the first reduces, the second adds to what was reduced."""
    ddp = wrap()

    def learn(_: nn.Module) -> None:
        loss = ddp(batch()).square().mean()
        loss.backward(retain_graph=True)
        with ddp.no_sync():
            loss.backward()

    fit(ddp, sgd(ddp), learn=learn)
    return Trained([ddp], buckets_told(ddp))


MODES = (
    Mode("activation checkpointing", checkpointed(reentrant=False), expect_regular()),
    Mode("activation checkpointing, reentrant", checkpointed(reentrant=True), expect_regular()),
    Mode(
        "activation checkpointing, reentrant, static_graph",
        checkpointed(reentrant=True, static_graph=True),
        expect_regular(rebuilt_at=2),
    ),
    Mode("mixed_precision", mixed_precision, expect_mixed_precision),
    Mode("optimizer in the backward", in_backward, expect_in_backward),
    Mode("create_graph", create_graph, expect_create_graph),
    Mode("gradient penalty", penalty, expect_regular()),
    Mode("two backwards through one graph", retained, expect_regular()),
)
