"""Optimizer steps, through torch's global optimizer hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..steps import ModuleState, StepRecorder

if TYPE_CHECKING:
    from ..session import Session
    from .ddp import Modules

__all__ = ["install"]


def install(session: Session, modules: Modules) -> Callable[[], None]:
    """Time every ``optimizer.step()``; returns what undoes it."""
    begun = session.guard(lambda optimizer: _tell(session, modules, optimizer, StepRecorder.begin_optimizer))
    ended = session.guard(lambda optimizer: _tell(session, modules, optimizer, StepRecorder.end_optimizer))

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


def _tell(
    session: Session,
    modules: Modules,
    optimizer: torch.optim.Optimizer,
    what: Callable[[StepRecorder, ModuleState], None],
) -> None:
    recording = session.recording
    if recording is not None:
        for state in modules.of_optimizer(optimizer):
            what(recording.steps, state)
