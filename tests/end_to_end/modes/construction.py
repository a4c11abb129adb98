"""What can be said to the constructor of DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ._expect import check_buckets, check_steps, only, ops
from ._mode import Log, Mode, Run, Trained, World
from ._training import STEPS, WIDTH, Net, backward, batch, buckets_told, fit, sgd, wrap

__all__ = ["MODES"]

CAPS_MB: Final = (2**-9, 2**-7)


def with_options(*, set_to_none: bool = True, **options: Any) -> Callable[[World], Trained]:
    """A plain training of a module that is wrapped with ``options``."""

    def train(_world: World) -> Trained:
        ddp = wrap(**options)
        fit(ddp, sgd(ddp), set_to_none=set_to_none)
        return Trained([ddp], buckets_told(ddp))

    return train


def expect(*, rebuilt_at: int | None = 1, several_first: bool = False, **info: Any) -> Callable[[list[Run]], None]:
    """A regular training, of a module of which the metadata say ``info``."""

    def check(runs: list[Run]) -> None:
        for log in only(runs):
            check_steps(log)
            check_buckets(log, log.told, rebuilt_at=rebuilt_at)
            assert (len(log.told["first"]) > 1) == several_first
            described = log.metadata["modules"]["0"]
            assert {name: described[name] for name in info} == info

    return check


class Branching(nn.Module):
    """Two branches of which each forward takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = Net(4), nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 9)

    def forward(self, inputs: torch.Tensor, goes_left: bool) -> torch.Tensor:
        inputs = self.trunk(inputs)
        outputs: torch.Tensor = self.left(inputs) if goes_left else self.right(inputs)
        return outputs


def find_unused(**options: Any) -> Callable[[World], Trained]:
    """Parameters without a gradient, others in each step and on each rank."""

    def train(world: World) -> Trained:
        ddp = wrap(Branching(), find_unused_parameters=True, **options)
        optimizer = sgd(ddp)
        for step in range(STEPS):
            optimizer.zero_grad()
            ddp(batch(), step % 3 == world.rank).square().mean().backward()
            optimizer.step()
        return Trained([ddp], buckets_told(ddp))

    return train


def skip_unused(_world: World) -> Trained:
    """The same parameters are without a gradient everywhere, and are not reduced."""
    ddp = wrap(Branching(), find_unused_parameters=True, skip_all_reduce_unused_params=True)
    optimizer = sgd(ddp)
    for _ in range(STEPS):
        optimizer.zero_grad()
        ddp(batch(), True).square().mean().backward()
        optimizer.step()
    return Trained([ddp], buckets_told(ddp))


def expect_skip_unused(runs: list[Run]) -> None:
    """Only the buckets with used parameters are reduced; the numbers of the others are missing."""
    for log in only(runs):
        check_steps(log)
        first = log.told["first"]
        for step in range(STEPS):
            rows = log.buckets_of(0, step)
            assert 0 < len(rows) <= len(first)
            for row in rows:
                assert row["bytes"] == first[row["bucket"]]


class Scaled(nn.Module):
    """A net and a factor that is not learned, without which DDP could not be told that all gradients are delayed."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Net()
        self.factor = nn.Parameter(torch.full((1,), 0.5), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.body(inputs) * self.factor
        return outputs


def delayed(first: str) -> Callable[[World], Trained]:
    """The gradients from the parameter ``first`` on are reduced in one piece.

    The parameter that gives the sign for it is none of them, and its gradient comes after theirs: what is added to
    their gradients later would be added while they are reduced.
    """

    def train(_world: World) -> Trained:
        net, front = Scaled(), nn.Parameter(torch.ones(WIDTH))
        learned = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
        names = [name for name, _ in learned]
        late = learned[names.index(first) :]
        sign = front if first == names[0] else net.body[0].bias
        ddp = wrap(net, delay_all_reduce_named_params=late, param_to_hook_all_reduce=sign)
        if not hasattr(ddp, "_lazy_init_ran"):
            # Where all gradients are delayed, torch's constructor returns early and forgets this, and forward fails.
            ddp._lazy_init_ran = True

        def learn(_: nn.Module) -> None:
            backward(ddp, batch() * front)
            settle(ddp)

        fit(ddp, sgd(ddp), learn=learn)
        told = {} if ddp.logger is None else buckets_told(ddp)
        return Trained([ddp], {**told, "delayed": [4 * sum(p.numel() for _, p in late)]})

    return train


def settle(ddp: DistributedDataParallel) -> None:
    """Wait for the delayed all-reduce, as torch itself does not: once it is over, all ranks hold the same gradients."""
    buffer = ddp._delay_grad_buffer
    assert buffer is not None
    held = [torch.empty_like(buffer) for _ in range(dist.get_world_size())]
    dist.all_gather(held, buffer.clone())
    while not all(torch.equal(held[0], other) for other in held):
        dist.all_gather(held, buffer.clone())


def expect_delayed(runs: list[Run]) -> None:
    for log in only(runs):
        check_steps(log)
        check_buckets(log, log.told)
        check_delayed(log)


def check_delayed(log: Log) -> None:
    """One all-reduce of the delayed gradients in each step, which is no bucket."""
    first = log.steps[0]["forward_start_ns"]
    inside = [row for row in log.others() if row["launch_ns"] > first and row["op"] == "all_reduce"]
    assert ops(inside) == [("all_reduce", log.told["delayed"][0])] * STEPS


def expect_all_delayed(runs: list[Run]) -> None:
    """There is no reducer: the end of the backward is unknown, the optimizer ends the step."""
    for log in only(runs):
        assert [(row["step"], row["micro_batch"]) for row in log.steps] == [(step, 0) for step in range(STEPS)]
        assert all(row["synced"] and row["optimizer_end_ns"] is not None for row in log.steps)
        assert all(row["compute_end_ns"] is row["backward_end_ns"] is None for row in log.steps)
        assert log.buckets_of(0) == []
        check_delayed(log)


class Mixed(nn.Module):
    """Parameters of two types, which DDP puts into buckets of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.single = Net(4)
        self.brain = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.single(self.brain(inputs.bfloat16()).float())
        return outputs


def mixed_types(_world: World) -> Trained:
    """Parameters in float32 and in bfloat16."""
    ddp = wrap(Mixed())
    fit(ddp, sgd(ddp))
    return Trained([ddp], buckets_told(ddp))


class Sparse(nn.Module):
    """An embedding with sparse gradients before a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH, sparse=True)
        self.body = Net(4)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.body(self.embedding(indices))
        return outputs


def sparse(_world: World) -> Trained:
    """Gradients of an embedding, which are sparse and of another size on each rank and in each step."""
    ddp = wrap(Sparse())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)

    def learn(_: nn.Module) -> None:
        backward(ddp, torch.randint(0, 50, (4,)))

    fit(ddp, optimizer, learn=learn)
    return Trained([ddp], buckets_told(ddp))


def expect_sparse(runs: list[Run]) -> None:
    for log in only(runs):
        check_steps(log)
        for step in range(STEPS):
            rows = log.buckets_of(0, step)
            for row in rows:
                assert row["op"] == "all_reduce"


MODES = (
    Mode(
        "find_unused_parameters",
        find_unused(),
        expect(rebuilt_at=None, several_first=True, find_unused_parameters=True),
    ),
    Mode(
        "find_unused_parameters, gradient_as_bucket_view",
        find_unused(gradient_as_bucket_view=True),
        expect(rebuilt_at=None, several_first=True),
    ),
    Mode(
        "skip_all_reduce_unused_params",
        skip_unused,
        expect_skip_unused,
        option="skip_all_reduce_unused_params",
    ),
    Mode("static_graph", with_options(static_graph=True), expect(rebuilt_at=2, static_graph=True)),
    Mode("gradient_as_bucket_view", with_options(gradient_as_bucket_view=True), expect(gradient_as_bucket_view=True)),
    Mode(
        "gradient_as_bucket_view, gradients kept",
        with_options(gradient_as_bucket_view=True, set_to_none=False),
        expect(gradient_as_bucket_view=True),
    ),
    Mode("bucket_cap_mb", with_options(bucket_cap_mb=2**-8), expect(bucket_cap_mb=2**-8)),
    Mode("default buckets", with_options(bucket_cap_mb=None), expect(bucket_cap_mb=25.0)),
    Mode(
        "bucket_cap_mb_list",
        with_options(bucket_cap_mb_list=list(CAPS_MB)),
        expect(several_first=True),
        option="bucket_cap_mb_list",
    ),
    Mode(
        "bucket_cap_mb_list, static_graph",
        with_options(bucket_cap_mb_list=list(CAPS_MB), static_graph=True),
        expect(rebuilt_at=2, several_first=True),
        option="bucket_cap_mb_list",
    ),
    Mode("delay_all_reduce_named_params, some", delayed("body.6.weight"), expect_delayed),
    Mode("delay_all_reduce_named_params, all", delayed("body.0.weight"), expect_all_delayed),
    Mode("batched_grad_copy", with_options(batched_grad_copy=True), expect(), option="batched_grad_copy"),
    Mode("parameters of two types", mixed_types, expect(several_first=True)),
    Mode("sparse gradients", sparse, expect_sparse),
)
