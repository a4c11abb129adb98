"""Optimizer steps, through torch's global optimizer hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..clock import now_ns

if TYPE_CHECKING:
    from ..session import Session
    from .ddp import Modules

__all__ = ["install"]


def install(session: Session, modules: Modules) -> Callable[[], None]:
    """Time every ``optimizer.step()``; returns what undoes it."""
    started: dict[int, int] = {}

    def before(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        started[id(optimizer)] = now_ns()

    def finish(optimizer: torch.optim.Optimizer) -> None:
        end_ns = now_ns()
        start_ns = started.pop(id(optimizer), None)
        recording = session.recording
        if recording is None or start_ns is None:
            return
        for state in modules.of_optimizer(optimizer):
            recording.steps.optimizer(state, start_ns, end_ns)

    finished = session.guard(finish)

    def after(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        finished(optimizer)

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo
