"""Communication hooks, and collectives beside those of DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from . import _hooks
from ._expect import check_buckets, check_steps, only, ops
from ._mode import Log, Mode, Row, Run, Trained, World
from ._training import STEPS, WIDTH, Net, buckets_told, fit, sgd, wrap

__all__ = ["MODES"]

STEPS_BEFORE: Final = 2
"""Steps before a hook is registered, where it is registered late."""
POWER_SGD_STARTS: Final = 3
"""Iteration at which PowerSGD begins to compress."""
POWER_SGD_RANK: Final = 2

Register = Callable[[DistributedDataParallel], None]


def hooked(register: Register, *, late: bool = False, **options: Any) -> Callable[[World], Trained]:
    """A training whose module gets a hook before the first step, or after `STEPS_BEFORE` of them."""

    def train(_world: World) -> Trained:
        ddp = wrap(**options)
        optimizer = sgd(ddp)
        if late:
            fit(ddp, optimizer, STEPS_BEFORE)
        register(ddp)
        fit(ddp, optimizer, STEPS - STEPS_BEFORE if late else STEPS)
        return Trained([ddp], buckets_told(ddp))

    return train


def expect_hook(
    name: str, *, factor: float = 1.0, late: bool = False, builtin: bool = False
) -> Callable[[list[Run]], None]:
    """All buckets are there. The process group sees what the hook sends: ``factor`` times the bytes of the bucket."""

    def check(runs: list[Run]) -> None:
        for log in only(runs):
            check_steps(log)
            seen = log.hooked or builtin
            check_buckets(log, log.told, exact_bytes=not seen)
            for row in log.buckets_of(0):
                sizes = log.told["rebuilt" if row["step"] else "first"]
                compressed = seen and row["step"] >= (STEPS_BEFORE if late else 0)
                assert row["bytes"] == sizes[row["bucket"]] * (factor if compressed else 1)
            assert log.metadata["modules"]["0"]["comm_hook"] == name

    return check


def register_own(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(ddp.process_group, _hooks.clipping)


def register_fp16(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)


def register_power_sgd(ddp: DistributedDataParallel) -> None:
    """PowerSGD waits in the callbacks of gloo's two threads: with more than one bucket in flight both would wait."""
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=POWER_SGD_RANK, start_powerSGD_iter=POWER_SGD_STARTS
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def register_silent(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, _hooks.silent)


def expect_silent(runs: list[Run]) -> None:
    """Seen from the process group there are no buckets; the communication hook sees that nothing takes long."""
    for log in only(runs):
        check_steps(log)
        if log.hooked:
            assert log.buckets_of(0) == []
        else:
            check_buckets(log, log.told)


def register_builtin(kind: BuiltinCommHookType) -> Register:
    """One of the hooks that torch has in C++."""

    def register(ddp: DistributedDataParallel) -> None:
        ddp._register_builtin_comm_hook(kind)

    return register


def expect_power_sgd(*, late: bool = False) -> Callable[[list[Run]], None]:
    """The first all-reduce that the hook issues is the bucket's, of the biases; those of P and Q are no buckets."""
    starts = POWER_SGD_STARTS + (STEPS_BEFORE if late else 0)
    biases = sum(p.nbytes for p in Net().parameters() if p.ndim == 1)
    shapes = [p.shape for p in Net().parameters() if p.ndim == 2]
    factors = [("all_reduce", 4 * POWER_SGD_RANK * sum(shape[side] for shape in shapes)) for side in (0, 1)]

    def check(runs: list[Run]) -> None:
        for log in only(runs):
            check_steps(log)
            check_buckets(log, log.told, exact_bytes=not log.hooked)
            first, rebuilt = log.told["first"], log.told["rebuilt"]
            for step in range(starts):
                assert [row["bytes"] for row in log.buckets_of(0, step)] == (rebuilt if step else first)
            for compressed in log.steps[starts:]:
                sent = [row["bytes"] for row in log.buckets_of(0, compressed["step"])]
                assert sent == ([biases] if log.hooked else rebuilt)
                assert ops(further(log, compressed)) == (factors if log.hooked else [])
            assert log.metadata["modules"]["0"]["comm_hook"] == "powerSGD_hook"

    return check


def further(log: Log, step: Row) -> list[Row]:
    """The collectives within a backward that are no buckets."""
    return [row for row in log.others() if step["forward_end_ns"] < row["launch_ns"] < step["backward_end_ns"]]


class Exchange(torch.autograd.Function):
    """A mean over ranks that is differentiated through, as in a synchronised batch norm."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.mean(0)
        dist.all_reduce(total)
        return x - total / dist.get_world_size()

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        total = gradients[0].mean(0)
        work = dist.distributed_c10d._get_default_group().allreduce([total])
        work.wait()
        return gradients[0] - total / dist.get_world_size()


def exchanged(inputs: torch.Tensor) -> torch.Tensor:
    """`Exchange`, with types."""
    apply: Callable[[torch.Tensor], torch.Tensor] = Exchange.apply
    return apply(inputs)


class Exchanging(nn.Module):
    """Layers between which the ranks exchange something in the forward and in the backward, and buffers.

    What is exchanged is as large as the bias of the layer next to it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Net(3), Net(3)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.get_buffer("calls").add_(1)
        outputs: torch.Tensor = self.second(self.norm(exchanged(self.first(inputs))))
        return outputs


def exchange(_world: World) -> Trained:
    """Collectives of the model in forward and backward, and buffers that DDP broadcasts."""
    ddp = wrap(Exchanging(), bucket_cap_mb=0.0001)
    fit(ddp, sgd(ddp))
    return Trained([ddp], buckets_told(ddp))


def expect_exchange(runs: list[Run]) -> None:
    """In each step: the broadcast of the buffers, the exchange of the forward, and that of the backward."""
    for log in only(runs):
        check_steps(log)
        check_buckets(log, log.told)
        assert WIDTH * 4 in log.told["rebuilt"]
        # The process group sees one broadcast for each type. There are two more, by which ranks agree on new buckets.
        buffers = [WIDTH * 8 + 4, 8] if log.hooked else [WIDTH * 8 + 4 + 8]
        for step in log.steps:
            inside = [r for r in log.others() if step["forward_start_ns"] <= r["launch_ns"] <= step["forward_end_ns"]]
            broadcasts = [size for op, size in ops(inside) if op == "broadcast"]
            assert broadcasts[2 if step["step"] == 1 else 0 :] == buffers
            assert ("all_reduce", WIDTH * 4) in ops(inside)
            assert ops(further(log, step)) == [("all_reduce", WIDTH * 4)]


def buffer_hook(_world: World) -> Trained:
    """The user's own way to synchronise buffers, after the forward."""
    ddp = wrap(nn.Sequential(nn.BatchNorm1d(WIDTH), Net()))

    def average(_state: object, buffers: dict[str, torch.Tensor]) -> Any:
        return [
            dist.all_reduce(buffer, op=dist.ReduceOp.MAX, async_op=True).get_future() for buffer in buffers.values()
        ]

    ddp._register_buffer_comm_hook(None, average)
    fit(ddp, sgd(ddp))
    return Trained([ddp], buckets_told(ddp))


def expect_buffer_hook(runs: list[Run]) -> None:
    for log in only(runs):
        check_steps(log)
        check_buckets(log, log.told)
        assert own_reductions(log) == [("all_reduce", WIDTH * 4), ("all_reduce", WIDTH * 4), ("all_reduce", 8)] * STEPS


def own_reductions(log: Log) -> list[tuple[str, int]]:
    """All-reduces that are no buckets, from the first forward on, those of DDP's rebuild of the buckets left out."""
    first = log.steps[0]["forward_start_ns"]
    return ops([row for row in log.others() if row["launch_ns"] > first and row["op"] == "all_reduce"])


def _modes() -> list[Mode]:
    fp16, builtin = "fp16_compress_hook", BuiltinCommHookType
    hooks: list[tuple[str, Register, str, float]] = [
        ("own communication hook", register_own, "clipping", 1),
        ("fp16_compress_hook", register_fp16, fp16, 0.5),
        ("built-in ALLREDUCE hook", register_builtin(builtin.ALLREDUCE), str(builtin.ALLREDUCE), 1),
        ("built-in FP16_COMPRESS hook", register_builtin(builtin.FP16_COMPRESS), str(builtin.FP16_COMPRESS), 0.5),
    ]
    return [
        Mode(
            f"{name}, {'after some steps' if late else 'before the first step'}",
            hooked(register, late=late),
            expect_hook(hook, factor=factor, late=late, builtin=name.startswith("built-in")),
        )
        for name, register, hook, factor in hooks
        for late in (False, True)
    ]


MODES = (
    *_modes(),
    Mode("PowerSGD, before the first step", hooked(register_power_sgd, bucket_cap_mb=None), expect_power_sgd()),
    Mode(
        "PowerSGD, after some steps",
        hooked(register_power_sgd, late=True, bucket_cap_mb=None),
        expect_power_sgd(late=True),
    ),
    Mode("a hook that sends nothing", hooked(register_silent), expect_silent),
    Mode("collectives and buffers in the model", exchange, expect_exchange),
    Mode("own synchronisation of buffers", buffer_hook, expect_buffer_hook),
)
