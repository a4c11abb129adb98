"""Before torch 2.14: the collectives of ``torch.distributed``, wrapped by name."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..clock import now_ns
from ..collectives import OP_CODES
from .patching import Patches
from .payload import payload_bytes

if TYPE_CHECKING:
    from ..session import Session

__all__ = ["install"]

_FUNCTIONS: Final = {
    "all_reduce": ("all_reduce", ("tensor",)),
    "broadcast": ("broadcast", ("tensor",)),
    "reduce": ("reduce", ("tensor",)),
    "all_gather": ("all_gather", ("tensor",)),
    "all_gather_into_tensor": ("all_gather", ("input_tensor",)),
    "reduce_scatter": ("reduce_scatter", ("input_list",)),
    "reduce_scatter_tensor": ("reduce_scatter", ("input",)),
    "all_to_all": ("all_to_all", ("input_tensor_list",)),
    "all_to_all_single": ("all_to_all", ("input",)),
    "gather": ("gather", ("tensor",)),
    "scatter": ("scatter", ("scatter_list",)),
    "barrier": ("barrier", ()),
    "_broadcast_coalesced": ("broadcast", ("tensors",)),
}
"""Function of ``torch.distributed`` → op, and the parameters that hold this rank's input."""

_POSITIONS: Final = {
    "all_gather": 1,
    "all_gather_into_tensor": 1,
    "reduce_scatter": 1,
    "reduce_scatter_tensor": 1,
    "all_to_all": 1,
    "all_to_all_single": 1,
    "scatter": 1,
    "_broadcast_coalesced": 1,
}
"""Position of the input among the positional arguments, where it is not the first."""


class _Thread(threading.local):
    """About the thread that asks.

    Attributes:
        is_foreign: whether Python did not start it.
    """

    def __init__(self) -> None:
        ident = threading.get_ident()
        known = (t for t in threading.enumerate() if not isinstance(t, threading._DummyThread))
        self.is_foreign = all(thread.ident != ident for thread in known)


_thread: Final = _Thread()


def _in_callback() -> bool:
    """Whether this is a callback of the backend, on a thread of its own.

    What it issues belongs to a collective that is recorded already, such as a bucket whose hook goes on in it. On
    another rank the same callback may run at once, inside that collective; counted in one place and not in the other,
    it would shift the numbers of all collectives behind it. The threads of the autograd engine are no callbacks.
    """
    return _thread.is_foreign and torch._C._current_graph_task_id() == -1


def install(session: Session, patches: Patches) -> None:
    """Wrap each collective in both modules that hold it."""
    for name, (op, inputs) in _FUNCTIONS.items():
        for module in (dist, distributed_c10d):
            patches.replace(module, name, _wrapper(session, name, op, inputs))


def _wrapper(
    session: Session, name: str, op: str, inputs: tuple[str, ...]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    position = _POSITIONS.get(name, 0)

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            inside = session.inside
            if session.recording is None or inside.depth or _in_callback():
                return original(*args, **kwargs)
            begun = _begin(session, OP_CODES[op], _payload(inputs, position, args, kwargs), _group(name, args, kwargs))
            inside.depth += 1
            try:
                work = original(*args, **kwargs)
            finally:
                inside.depth -= 1
            if begun is not None:
                _end(session, begun, work)
            return work

        return collective

    return wrap


def _payload(inputs: tuple[str, ...], position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not inputs:
        return None
    return kwargs[inputs[0]] if inputs[0] in kwargs else args[position] if len(args) > position else None


def _group(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The process group among the arguments, None for the default group."""
    if "group" in kwargs:
        return kwargs["group"]
    if name == "_broadcast_coalesced" and "process_group" in kwargs:
        return kwargs["process_group"]
    return next((a for a in args if isinstance(a, dist.ProcessGroup)), None)


def _begin(session: Session, op: int, payload: Any, group: Any) -> Any:
    try:
        recording = session.recording
        if recording is None:
            return None
        member = distributed_c10d._get_default_group() if group is None else group
        if not isinstance(member, dist.ProcessGroup):
            # A rank outside the group takes no part: torch hands it a number in place of a group.
            return None
        number = session.group_number(member)
        if recording.steps.paused:
            recording.collectives.skip(number)
            return None
        tensors = payload if isinstance(payload, (list, tuple)) else [] if payload is None else [payload]
        size = payload_bytes(t for t in tensors if isinstance(t, torch.Tensor))
        slot = recording.collectives.launch(number, op, size, now_ns())
        if slot is not None:
            recording.launched(slot)
        return slot
    except Exception as error:
        session.failed(error)
        return None


def _end(session: Session, slot: Any, work: Any) -> None:
    """A collective that returned no work is over; one that did ends when its future does."""
    try:
        recording = session.recording
        if recording is None or slot is None:
            return
        if work is None or not hasattr(work, "get_future"):
            recording.ended(slot)
        else:
            work.get_future().add_done_callback(recording.ender(slot))
    except RuntimeError:
        return
    except Exception as error:
        session.failed(error)
