"""Optimizer steps, through torch's global optimizer hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from ..recording import Recording
    from ..session import Session
    from .ddp import Modules
    from .reductions import Reductions

__all__ = ["install"]


def install(session: Session, modules: Modules, reductions: Reductions) -> Callable[[], None]:
    """Time every ``optimizer.step()``; returns what undoes it."""
    begun = session.guard(lambda optimizer: _begin(session.recording, modules, reductions, optimizer))
    ended = session.guard(lambda optimizer: _end(session.recording, modules, reductions, optimizer))

    def before(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            modules.stepping = weakref.ref(optimizer)
            begun(optimizer)

    def after(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            modules.stepping = None
            ended(optimizer)

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _begin(
    recording: Recording | None, modules: Modules, reductions: Reductions, optimizer: torch.optim.Optimizer
) -> None:
    if recording is None:
        return
    if not modules and not reductions.has_models:
        reductions.begin_step_of(optimizer, recording)
        return
    for state in modules.of_optimizer(optimizer) or reductions.of_optimizer(optimizer):
        recording.steps.begin_optimizer(state)


def _end(
    recording: Recording | None, modules: Modules, reductions: Reductions, optimizer: torch.optim.Optimizer
) -> None:
    if recording is None:
        return
    is_alone = not modules and not reductions.has_models
    if (is_alone or reductions.get(optimizer) is not None) and reductions.end_step_of(optimizer, recording):
        return
    for state in modules.of_optimizer(optimizer) or reductions.of_optimizer(optimizer):
        recording.steps.end_optimizer(state)
