"""How forwards, backwards and steps follow each other."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import nn

from ._expect import check_backward, check_buckets, check_steps, only
from ._mode import Log, Mode, Row, Run, Trained, World
from ._training import STEPS, backward, batch, buckets_told, fit, sgd, wrap

__all__ = ["MODES"]

CYCLE = 4


def plain(_world: World) -> Trained:
    """One forward, one backward, one step of the optimizer."""
    ddp = wrap()
    fit(ddp, sgd(ddp))
    return Trained([ddp], buckets_told(ddp))


def expect_plain(runs: list[Run]) -> None:
    for log in only(runs):
        check_steps(log)
        check_buckets(log, log.told)
        assert len(log.told["rebuilt"]) > 1
        assert log.metadata["modules"]["0"]["comm_hook"] is None


def accumulate(_world: World) -> Trained:
    """Gradient accumulation over four forwards, three of them under ``no_sync``."""
    ddp = wrap()

    def learn(_: nn.Module) -> None:
        for micro_batch in range(CYCLE):
            with ddp.no_sync() if micro_batch < CYCLE - 1 else nullcontext():
                backward(ddp)

    fit(ddp, sgd(ddp), learn=learn)
    return Trained([ddp], buckets_told(ddp))


def expect_accumulation(runs: list[Run]) -> None:
    for log in only(runs):
        check_steps(log, cycle=CYCLE)
        check_buckets(log, log.told)


def evaluate(_world: World) -> Trained:
    """Passes without gradients between the steps, in evaluation mode and in training mode."""
    ddp = wrap()

    def learn(_: nn.Module) -> None:
        ddp.eval()
        with torch.no_grad():
            ddp(batch())
        ddp.train()
        with torch.inference_mode():
            ddp(batch())
        backward(ddp)

    fit(ddp, sgd(ddp), learn=learn)
    return Trained([ddp], buckets_told(ddp))


def several_forwards(_world: World) -> Trained:
    """Two forwards, whose losses share one backward."""
    ddp = wrap()

    def learn(_: nn.Module) -> None:
        (ddp(batch()).square().mean() + ddp(batch()).abs().mean()).backward()

    fit(ddp, sgd(ddp), learn=learn)
    return Trained([ddp], buckets_told(ddp))


def expect_several_forwards(runs: list[Run]) -> None:
    """The gradients of both forwards are reduced, once: with the last of them."""
    for log in only(runs):
        assert [(row["step"], row["micro_batch"]) for row in log.steps] == [
            (s, m) for s in range(STEPS) for m in (0, 1)
        ]
        assert all(row["synced"] for row in log.steps)
        for row in log.steps:
            if row["micro_batch"] == 0:
                assert row["forward_end_ns"] is not None
                assert row["backward_end_ns"] is row["optimizer_end_ns"] is None
            else:
                check_backward(row)
        last = [row for row in log.steps if row["micro_batch"] == 1]
        check_buckets(_with_steps(log, last), log.told)


def _with_steps(log: Log, rows: list[Row]) -> Log:
    return replace(log, steps=rows)


def skipped_backward(_world: World) -> Trained:
    """The loss of each third forward is thrown away, as for a batch that turns out to be bad."""
    ddp = wrap()
    optimizer = sgd(ddp)
    for number in range(3 * CYCLE):
        optimizer.zero_grad()
        loss = ddp(batch()).square().mean()
        if number % 3 < 2:
            loss.backward()
            optimizer.step()
    return Trained([ddp], buckets_told(ddp))


def expect_skipped_backward(runs: list[Run]) -> None:
    """A forward without a backward is an earlier forward of the step that the next backward ends."""
    expected = [(0, 0), (1, 0), (2, 0), (2, 1), (3, 0), (4, 0), (4, 1), (5, 0), (6, 0), (6, 1), (7, 0), (8, 0)]
    for log in only(runs):
        assert [(row["step"], row["micro_batch"]) for row in log.steps] == expected
        ended = [row for row in log.steps if row["backward_end_ns"] is not None]
        assert [row["step"] for row in ended] == list(range(8))
        for row in ended:
            check_backward(row)
        check_buckets(_with_steps(log, ended), log.told, steps=range(8))


def closure(_world: World) -> Trained:
    """The optimizer is given a closure and runs forward and backward itself, as Lightning does it."""
    ddp = wrap()
    optimizer = sgd(ddp)

    def evaluate_loss() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = ddp(batch()).square().mean()
        loss.backward()
        return loss

    for step in range(STEPS):
        if step % 2:
            optimizer.step(evaluate_loss)
        else:
            loss = evaluate_loss()
            optimizer.step(lambda known=loss: known)
    return Trained([ddp], buckets_told(ddp))


def lbfgs(_world: World) -> Trained:
    """An optimizer that evaluates the loss as often as it likes."""
    ddp = wrap()
    optimizer = torch.optim.LBFGS(ddp.parameters(), lr=0.1, max_iter=3)
    inputs = batch()

    def evaluate_loss() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = ddp(inputs).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(evaluate_loss)
    return Trained([ddp], {**buckets_told(ddp), "evaluations": [optimizer.state_dict()["state"][0]["func_evals"]]})


def expect_lbfgs(runs: list[Run]) -> None:
    """Each evaluation is a step; what the optimizer does until the next one is its own time."""
    for log in only(runs):
        [evaluations] = log.told["evaluations"]
        assert evaluations > 4
        check_steps(log, steps=evaluations)
        check_buckets(log, log.told, steps=range(evaluations))


MODES = (
    Mode("plain training", plain, expect_plain),
    Mode("gradient accumulation with no_sync", accumulate, expect_accumulation),
    Mode("evaluation between the steps", evaluate, expect_plain),
    Mode("two forwards, one backward", several_forwards, expect_several_forwards),
    Mode("optimizer with a closure", closure, expect_plain),
    Mode("LBFGS", lbfgs, expect_lbfgs),
    Mode("a forward without a backward", skipped_backward, expect_skipped_backward),
)
