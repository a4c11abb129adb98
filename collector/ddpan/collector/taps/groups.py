"""Process groups: the default group's life is a recording's life, and further groups are listened to as well."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from .patching import Patches

if TYPE_CHECKING:
    from ..session import Session

__all__ = ["install"]


def install(session: Session, patches: Patches) -> None:
    """Wrap creation and destruction of process groups."""
    # Both modules hold the functions under their own name, and users call either.
    for module in (dist, distributed_c10d):
        patches.replace(module, "init_process_group", lambda original: _opening(session, original))
        patches.replace(module, "destroy_process_group", lambda original: _closing(session, original))
    patches.replace(distributed_c10d, "_new_process_group_helper", lambda original: _listening(session, original))


def _opening(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    open_recording = session.guard(session.open)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        open_recording()
        return result

    return init_process_group


def _closing(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    close_recording = session.guard(session.close)
    leave = session.guard(session.leave)

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> Any:
        if group is None or group == dist.group.WORLD:
            close_recording()
        elif isinstance(group, dist.ProcessGroup):
            leave(group)
        return original(group)

    return destroy_process_group


def _listening(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    def listen(result: Any) -> None:
        group = result[0] if isinstance(result, tuple) else result
        if session.recording is not None and isinstance(group, dist.ProcessGroup):
            session.listen_to(group)

    listening = session.guard(listen)

    @functools.wraps(original)
    def new_process_group(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        listening(result)
        return result

    return new_process_group
