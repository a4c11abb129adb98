"""Beginnings and ends: of inputs, of process groups, of processes, of the recording."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from . import _hooks
from ._expect import check_buckets, check_steps, only
from ._mode import Mode, Run, Trained, World
from ._training import STEPS, WIDTH, Net, backward, batch, buckets_told, fit, sgd, wrap

__all__ = ["MODES"]


def uneven(*, divide_by_initial: bool, **options: Any) -> Callable[[World], Trained]:
    """Each rank has two batches more than the one before it, and joins when it has no more."""

    def train(world: World) -> Trained:
        ddp = wrap(**options)
        optimizer = sgd(ddp)
        steps = STEPS + 2 * world.rank
        with ddp.join(divide_by_initial_world_size=divide_by_initial):
            fit(ddp, optimizer, steps)
        return Trained([ddp], {**buckets_told(ddp), "steps": [steps]})

    return train


def expect_uneven(runs: list[Run]) -> None:
    """A rank's steps end with its inputs; it goes on to take part in the others' all-reduces, and is marked."""
    logs = only(runs)
    longest = max(log.told["steps"][0] for log in logs)
    for log in logs:
        [steps] = log.told["steps"]
        check_steps(log, steps=steps)
        check_buckets(log, log.told, steps=range(steps))
        joined = log.metadata["modules"]["0"]["joined_after_step"]
        assert joined == (None if steps == longest else steps - 1)
        last = log.steps[-1]["optimizer_end_ns"]
        buckets = [row for row in log.others() if row["launch_ns"] > last and row["bytes"] in log.told["rebuilt"]]
        assert len(buckets) >= (longest - steps) * len(log.told["rebuilt"])
    assert {log.metadata["world_size"] for log in logs} == {len(logs)}


def second_group(world: World) -> Trained:
    """Train, destroy the process group, initialise another, and train on with the same weights."""
    model = Net()
    for life in range(2):
        place = f"file://{world.out}/life-{life}"
        dist.init_process_group("gloo", init_method=place, rank=world.rank, world_size=world.size)
        ddp = wrap(model)
        fit(ddp, sgd(ddp))
        told = buckets_told(ddp)
        dist.barrier()
        del ddp
        gc.collect()
        dist.destroy_process_group()
    return Trained([model], told)


def expect_two_runs(runs: list[Run]) -> None:
    """Each life of the default process group is a run of its own, of all ranks."""
    assert len(runs) == 2
    assert len({log.metadata["run"] for run in runs for log in run.values()}) == 2
    for run in runs:
        for log in run.values():
            assert len(run) == log.metadata["world_size"]
            check_steps(log)
            check_buckets(log, log.told)


def other_group(_world: World) -> Trained:
    """DDP is given another process group in the middle of the training."""
    ddp = wrap()
    optimizer = sgd(ddp)
    fit(ddp, optimizer, 3)
    ddp._update_process_group(dist.new_group())
    fit(ddp, optimizer, STEPS - 3)
    return Trained([ddp], buckets_told(ddp))


def expect_other_group(runs: list[Run]) -> None:
    for log in only(runs):
        check_steps(log)
        check_buckets(log, log.told)
        groups = [{row["group"] for row in log.buckets_of(0, step)} for step in range(STEPS)]
        assert groups == [groups[0]] * 3 + [groups[-1]] * 3
        assert len(groups[0] | groups[-1]) == 2
        assert {log.metadata["modules"]["0"]["group"]} == groups[-1]


def workers(_world: World) -> Trained:
    """Batches from two forked workers, which do what the collector patches in the parent."""
    ddp = wrap()
    data = TensorDataset(torch.randn(STEPS * 4, WIDTH))
    loader = DataLoader(data, batch_size=4, num_workers=2, collate_fn=collate, multiprocessing_context="fork")
    optimizer = sgd(ddp)
    for inputs, _pid in loader:
        optimizer.zero_grad()
        backward(ddp, inputs)
        optimizer.step()
    return Trained([ddp], buckets_told(ddp))


def collate(samples: list[tuple[torch.Tensor]]) -> tuple[torch.Tensor, int]:
    """A batch; the worker goes through a small loader of its own and steps an optimizer for it."""
    inputs = torch.cat([next(iter(DataLoader(TensorDataset(sample[None]))))[0] for (sample,) in samples])
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], lr=0.5).step()
    return inputs * weight.detach() * 2, os.getpid()


def expect_workers(runs: list[Run]) -> None:
    """The workers leave no row, and the wait for them is known."""
    for log in only(runs):
        check_steps(log)
        check_buckets(log, log.told)
        assert all(row["data_wait_ns"] > 0 for row in log.steps)


def late(*, keeps_views: bool) -> Callable[[World], Trained]:
    """A recording that begins after DDP was built and has trained, and lasts."""

    def train(world: World) -> Trained:
        ddp = wrap(gradient_as_bucket_view=keeps_views)
        optimizer = sgd(ddp)
        fit(ddp, optimizer, 3, set_to_none=not keeps_views)
        world.start()
        fit(ddp, optimizer, STEPS, set_to_none=not keeps_views)
        return Trained([ddp], buckets_told(ddp))

    return train


def late_hook(world: World) -> Trained:
    """As before, with a hook of the user's that was registered before the recording began."""
    ddp = wrap()
    ddp.register_comm_hook(dist.group.WORLD, _hooks.halving)
    optimizer = sgd(ddp)
    fit(ddp, optimizer, 3)
    world.start()
    fit(ddp, optimizer)
    return Trained([ddp], buckets_told(ddp))


def late_within(world: World) -> Trained:
    """The recording begins between a forward and its backward."""
    ddp = wrap()
    optimizer = sgd(ddp)
    fit(ddp, optimizer, 3)
    optimizer.zero_grad()
    loss = ddp(batch()).square().mean()
    world.start()
    loss.backward()
    optimizer.step()
    fit(ddp, optimizer)
    return Trained([ddp], buckets_told(ddp))


def expect_late(runs: list[Run]) -> None:
    """Steps count from the beginning of the recording, in the layout that it found."""
    for log in only(runs):
        check_steps(log)
        check_buckets(log, log.told, rebuilt_at=0)
        assert "0" not in log.metadata["layouts"]["0"]


def expect_plain(runs: list[Run]) -> None:
    for log in only(runs):
        check_steps(log)
        check_buckets(log, log.told)


def expect_late_hook(runs: list[Run]) -> None:
    for log in only(runs):
        assert [(row["step"], row["micro_batch"], row["synced"]) for row in log.steps] == [
            (step, 0, True) for step in range(STEPS)
        ]


def plain(_world: World) -> Trained:
    """A plain training."""
    ddp = wrap()
    fit(ddp, sgd(ddp))
    return Trained([ddp], buckets_told(ddp))


MODES = (
    Mode("join, divided by the initial world size", uneven(divide_by_initial=True), expect_uneven),
    Mode("join, divided by the ranks that are left", uneven(divide_by_initial=False), expect_uneven),
    Mode(
        "join, gradient_as_bucket_view",
        uneven(divide_by_initial=False, gradient_as_bucket_view=True),
        expect_uneven,
    ),
    Mode("a second process group", second_group, expect_two_runs, makes_group=True),
    Mode("another process group for DDP", other_group, expect_other_group),
    Mode("forked workers of a DataLoader", workers, expect_workers),
    Mode("torch.multiprocessing, spawn", plain, expect_plain, ranks=2, launch="spawn"),
    Mode("torch.multiprocessing, fork", plain, expect_plain, ranks=2, launch="fork"),
    Mode("start() after some steps", late(keeps_views=False), expect_late, late=True),
    Mode("start() after some steps, gradients kept as views", late(keeps_views=True), expect_late, late=True),
    Mode("start() after some steps, with a hook", late_hook, expect_late_hook, late=True),
    Mode("start() between forward and backward", late_within, expect_late, late=True),
)
