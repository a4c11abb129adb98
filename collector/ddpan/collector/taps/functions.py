"""Before torch 2.14: the collectives of process groups, wrapped on their class.

All functions of ``torch.distributed`` come to these methods, whoever holds them under whatever name, and so do callers
that use a group directly. Not seen are collectives that C++ code issues, such as those of compiled code.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..clock import now_ns
from ..collectives import OP_CODES
from ..segments import Slot
from .others import Others
from .patching import Patches

if TYPE_CHECKING:
    from ..session import Session

__all__ = ["install"]

_METHODS: Final = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 1),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "recv_anysource": ("recv", 0),
    "barrier": ("barrier", None),
}
"""Method of ``ProcessGroup`` → op, and the position of what this rank puts in, or of a receive what it takes in."""

_INPUTS: Final = ("tensors", "tensor", "input", "inputs", "input_tensors", "input_tensor", "inputTensor")
"""Names of that argument, where it is not given by position."""


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


def install(session: Session, others: Others, patches: Patches) -> None:
    """Wrap the methods, and the one function that issues its collectives in C++."""
    for name, (op, position) in _METHODS.items():
        patches.replace(dist.ProcessGroup, name, _wrapper(session, others, OP_CODES[op], position))
    for module in (dist, distributed_c10d):
        patches.replace(module, "_broadcast_coalesced", _wrapper(session, others, OP_CODES["broadcast"], 0))


def _wrapper(
    session: Session, others: Others, op: int, position: int | None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    issued = session.guard(others.issued)
    inside = session.inside

    def launch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Slot | None:
        launch_ns = now_ns()
        recording = session.recording
        try:
            if recording is None or _in_callback():
                return None
            group = args[0] if args else kwargs["process_group"]
            return others.launch(recording, group, op, _flat(_input(position, args[1:], kwargs)), launch_ns)
        except Exception as error:
            session.failed(error)
            return None

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            if session.recording is None or inside.depth or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            slot = launch(args, kwargs)
            inside.depth += 1
            try:
                work = original(*args, **kwargs)
            finally:
                inside.depth -= 1
            if slot is not None and session.recording is not None:
                issued(session.recording, slot, work)
            return work

        return collective

    return wrap


def _input(position: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if position is None:
        return ()
    if len(args) > position:
        return args[position]
    return next((kwargs[name] for name in _INPUTS if name in kwargs), ())


def _flat(tensors: Any) -> Iterator[torch.Tensor]:
    """The tensors in ``tensors``: one, a list, or a list of lists."""
    if isinstance(tensors, torch.Tensor):
        yield tensors
    elif isinstance(tensors, (list, tuple)):
        for one in tensors:
            yield from _flat(one)
