"""Telling buckets from other collectives, where all that is seen is a collective of a process group.

A bucket has a buffer of its own while a layout lasts, so its address tells. The first time in a layout, a bucket is an
all-reduce of one tensor that the reducer itself issues in a backward, on the module's group, of the size that the
layout expects next. Where that holds for several modules, the one whose next bucket is ready is meant: a reducer
launches a bucket as soon as it is ready, so no other module has one that is ready and not launched.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.autograd.graph import _engine_run_backward

from .payload import payload_bytes

if TYPE_CHECKING:
    from types import FrameType

    from ..steps import ModuleState
    from .ddp import Modules

__all__ = ["Buckets", "find_in"]

_ENGINE: Final = _engine_run_backward.__code__

Found = tuple["ModuleState", int, int]
"""The module, the index of its bucket, and the bytes that the collective sends."""


class Buckets:
    """Finds the bucket that a collective is.

    Args:
        modules: the modules whose buckets may be launched.
    """

    def __init__(self, modules: Modules) -> None:
        self._modules = modules

    def known(self, tensors: list[Any]) -> Found | None:
        """The bucket if it was seen before, or if a user's hook announced it, else None."""
        modules = self._modules
        state = modules.in_hook
        if state is not None:
            modules.in_hook = None
            return state, state.next_bucket, payload_bytes(tensors)
        if len(tensors) != 1:
            return None
        [tensor] = tensors
        address = _address(tensor)
        if address:
            for state in modules.armed:
                found = _seen(state, tensor, address)
                if found is not None:
                    return found
        return None

    def find(self, group: int, tensors: list[Any]) -> Found | None:
        """The bucket that an all-reduce is, by its size, or None if it is none.

        Called by a function that a hook of the process group itself calls.
        """
        if len(tensors) != 1 or not _issued_by_reducer(sys._getframe(2)):
            return None
        [tensor] = tensors
        size_bytes = tensor.numel() * tensor.element_size()
        candidates = [
            (s, k) for s in self._modules.armed if s.group == group and (k := s.find_bucket(size_bytes)) is not None
        ]
        if len(candidates) > 1:
            candidates = [(s, k) for s, k in candidates if _is_ready(s, k, size_bytes)] or candidates
        return _adopted(*candidates[-1], tensor, size_bytes) if candidates else None


def find_in(state: ModuleState, tensor: torch.Tensor) -> Found | None:
    """The bucket of a module that an all-reduce of its reducer is, or None if it is none."""
    address = _address(tensor)
    found = _seen(state, tensor, address) if address else None
    if found is not None:
        return found
    size_bytes = tensor.numel() * tensor.element_size()
    index = state.find_bucket(size_bytes)
    return None if index is None else _adopted(state, index, tensor, size_bytes)


def _seen(state: ModuleState, tensor: torch.Tensor, address: int) -> Found | None:
    """The bucket with this address, if it is due."""
    index = state.addresses.get(address, -1)
    if index < state.next_bucket or state.layout is None:
        return None
    sizes = state.layout.sizes_bytes
    return state, index, sizes[index] if sizes else tensor.nbytes


def _adopted(state: ModuleState, index: int, tensor: torch.Tensor, size_bytes: int) -> Found:
    """The bucket with this index, whose address tells it from now on."""
    address = _address(tensor)
    if address:
        state.addresses[address] = index
        return state, index, size_bytes
    sent = payload_bytes([tensor])
    # To the layout a sparse bucket is as large as its parameter.
    state.launched_bytes += size_bytes - sent
    return state, index, sent


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0  # a sparse tensor has none


def _issued_by_reducer(hook: FrameType) -> bool:
    """Whether the hook with this frame was called by the autograd engine itself.

    A collective that Python code issues in a backward has that code below the hook. On a thread of the engine's own
    there is nothing below.
    """
    if torch._C._current_graph_task_id() == -1:
        return False
    return hook.f_back is None or hook.f_back.f_code is _ENGINE


def _is_ready(state: ModuleState, index: int, size_bytes: int) -> bool:
    """Whether the gradients of the module's next bucket are ready, by what the reducer says of each gradient."""
    if state.layout is None or state.ready_times is None:
        return False
    changes = zip(state.ready_before, state.ready_times(), strict=True)
    ready = {i for i, (before, now) in enumerate(changes) if before != now}
    if state.layout.parameters:
        return ready.issuperset(state.layout.parameters[index])
    return sum(state.parameter_bytes[i] for i in ready) >= state.launched_bytes + size_bytes
