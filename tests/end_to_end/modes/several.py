"""Several modules, several groups."""

from __future__ import annotations

import gc
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from ._expect import check_buckets, check_steps, only
from ._mode import Mode, Run, Trained, World
from ._training import STEPS, WIDTH, batch, buckets_told, fit, sgd, wrap

__all__ = ["MODES"]


def adversaries(_world: World) -> Trained:
    """A generator and a discriminator, of one architecture: the one learns through the other."""
    generator, discriminator = wrap(), wrap()
    learns_to_make, learns_to_tell = sgd(generator), sgd(discriminator)
    for _ in range(STEPS):
        learns_to_tell.zero_grad()
        (discriminator(generator(batch()).detach()).mean() - discriminator(batch()).mean()).backward()
        learns_to_tell.step()
        learns_to_make.zero_grad()
        discriminator(generator(batch())).square().mean().backward()
        learns_to_make.step()
    told = {"generator": buckets_told(generator), "discriminator": buckets_told(discriminator)}
    return Trained([generator, discriminator], told)


def expect_adversaries(runs: list[Run]) -> None:
    """The generator's first forward of two has no backward; the discriminator's backwards are two, and both reduce."""
    for log in only(runs):
        made = log.steps_of(0)
        assert [(row["step"], row["micro_batch"]) for row in made] == [(s, m) for s in range(STEPS) for m in (0, 1)]
        assert [row["backward_end_ns"] is not None for row in made] == [False, True] * STEPS
        check_buckets(replace(log, steps=[row for row in log.steps if row["backward_end_ns"]]), log.told["generator"])
        told = log.steps_of(1)
        expected = [(2 * s + (m > 1), m % 2) for s in range(STEPS) for m in (0, 1, 2)]
        assert [(row["step"], row["micro_batch"]) for row in told] == expected
        ended = replace(log, steps=[row for row in log.steps if row["backward_end_ns"]])
        check_buckets(ended, log.told["discriminator"], module=1, steps=range(2 * STEPS))


def twins(_world: World) -> Trained:
    """Two modules of one architecture whose backwards run as one, as in CycleGAN."""
    there, back = wrap(), wrap()
    optimizer = sgd(there, back)
    for _ in range(STEPS):
        optimizer.zero_grad()
        inputs = batch()
        around = back(there(inputs))
        (around - inputs).square().mean().backward()
        optimizer.step()
    return Trained([there, back], {"0": buckets_told(there), "1": buckets_told(back)})


def side_by_side(_world: World) -> Trained:
    """Two modules of one architecture that do not follow each other: their buckets come in turns."""
    left, right = wrap(), wrap()
    optimizer = sgd(left, right)
    for step in range(STEPS):
        optimizer.zero_grad()
        pair = (left, right) if step % 2 else (right, left)
        outputs = [module(batch()) for module in pair]
        (outputs[0].square().mean() + outputs[1].abs().mean()).backward()
        optimizer.step()
    return Trained([left, right], {"0": buckets_told(left), "1": buckets_told(right)})


def expect_both(runs: list[Run]) -> None:
    for log in only(runs):
        for module in (0, 1):
            check_steps(log, module=module)
            check_buckets(log, log.told[str(module)], module=module)
        for step in range(STEPS):
            of_modules = {row["module"] for row in log.collectives if row["step"] == step}
            assert of_modules == {0, 1}


def replaced(_world: World) -> Trained:
    """A module that is thrown away after a forward without a backward, and another one in its place."""
    first = wrap()
    fit(first, sgd(first))
    first(batch())
    told = {"0": buckets_told(first)}
    weights = first.module.state_dict()
    del first
    gc.collect()
    second = wrap()
    second.module.load_state_dict(weights)
    fit(second, sgd(second))
    return Trained([second], {**told, "1": buckets_told(second)})


def expect_replaced(runs: list[Run]) -> None:
    """The second module has a number, buckets and steps of its own."""
    for log in only(runs):
        ended = replace(log, steps=[row for row in log.steps if row["backward_end_ns"]])
        for module in (0, 1):
            check_steps(ended, module=module)
            check_buckets(ended, log.told[str(module)], module=module)


def subgroups(world: World) -> Trained:
    """Two groups of two ranks train a module each, and sum up a number over all ranks in the backward."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[world.rank // 2]
    ddp = wrap(process_group=mine)
    optimizer = sgd(ddp)
    size = ddp.module[0].bias.numel()

    def learn(_: nn.Module) -> None:
        outputs = ddp(batch())
        outputs.register_hook(lambda _: dist.all_reduce(torch.ones(size)))
        outputs.square().mean().backward()

    fit(ddp, optimizer, learn=learn)
    return Trained([ddp], buckets_told(ddp))


def expect_subgroups(runs: list[Run]) -> None:
    for log in only(runs):
        check_steps(log)
        check_buckets(log, log.told)
        number = log.metadata["modules"]["0"]["group"]
        assert log.metadata["groups"][str(number)]["ranks"] == [log.rank // 2 * 2, log.rank // 2 * 2 + 1]
        assert {row["group"] for row in log.buckets_of(0)} == {number}
        assert number != 0
        sums = [row for row in log.others() if row["op"] == "all_reduce" and row["group"] == 0]
        assert [row["bytes"] for row in sums] == [4 * (WIDTH + 1)] * STEPS


def overlapping(world: World) -> Trained:
    """A module over all ranks and, inside the same loss, one over a pair of them, of the same architecture."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    everybody, pair = wrap(), wrap(process_group=groups[world.rank // 2])
    optimizer = sgd(everybody, pair)
    for _ in range(STEPS):
        optimizer.zero_grad()
        pair(everybody(batch())).square().mean().backward()
        optimizer.step()
    return Trained([everybody, pair], {"0": buckets_told(everybody), "1": buckets_told(pair)})


def expect_overlapping(runs: list[Run]) -> None:
    expect_both(runs)
    for log in only(runs):
        groups = {module: {row["group"] for row in log.buckets_of(module)} for module in (0, 1)}
        assert groups[0] == {0}
        assert 0 not in groups[1]


MODES = (
    Mode("generator and discriminator", adversaries, expect_adversaries),
    Mode("two modules, one after the other", twins, expect_both),
    Mode("two modules, side by side", side_by_side, expect_both),
    Mode("a module thrown away and replaced", replaced, expect_replaced),
    Mode("two groups of two ranks", subgroups, expect_subgroups, ranks=4),
    Mode("a module over all ranks and one over a pair", overlapping, expect_overlapping, ranks=4),
)
