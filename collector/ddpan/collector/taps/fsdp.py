"""FSDP2: models under ``fully_shard``, followed through the forward of their root and the backward.

The hooks that ``fully_shard`` puts on modules are bound when it is called, which may have been before this is in place.
What is wrapped here are methods that those hooks look up each time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .late import LateTap
from .reductions import Reduced

__all__ = ["ShardedModels"]


class ShardedModels(LateTap):
    """The models of this process that FSDP2 shards."""

    place = ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState")

    def _watch(self, watched: Any) -> None:
        guard = self._session.guard
        replace = self._patches.replace
        replace(watched, "_root_pre_forward", functools.partial(_preceded, self._is_root, guard(self._begin_forward)))
        replace(watched, "_register_pre_backward_hook", functools.partial(_followed, guard(self._end_forward)))
        replace(watched, "_pre_backward", functools.partial(_announced, guard(self._begin_backward)))
        around = (guard(self._end_compute), guard(self._end_backward))
        replace(watched, "_root_post_backward_final_callback", functools.partial(_surrounded, *around))

    def _is_root(self, state: Any) -> bool:
        """Whether this is the beginning of the forward of a whole model, with gradients."""
        try:
            return (
                self._session.recording is not None
                and torch.is_grad_enabled()
                and state._is_root is not False
                and state._state_ctx.iter_forward_root is None
            )
        except AttributeError:
            return False

    def _begin_forward(self, state: Any) -> None:
        recording = self._session.recording
        if recording is None:
            return
        known = self._reductions.get(state._state_ctx)
        if known is None:
            groups = [group for one in state._state_ctx.all_states for group in one._fsdp_param_groups]
            if not groups:
                return
            known = self._reductions.add(
                state._state_ctx,
                recording,
                kind="fsdp",
                name=type(state._modules[0]).__name__.removeprefix("FSDP"),
                group=groups[0]._reduce_scatter_process_group,
                parameters=state._modules[0].parameters(),
            )
        recording.steps.begin_forward(known.state, synced=_synced(state))

    def _end_forward(self, state: Any) -> None:
        recording, known = self._session.recording, self._known(state)
        if recording is not None and known is not None and state._state_ctx.iter_forward_root is state:
            recording.steps.end_forward(known.state, synced=_synced(state))

    def _begin_backward(self, state: Any) -> None:
        known = self._known(state)
        if known is not None:
            self._reductions.begin_backward(known)

    def _end_compute(self, state: Any) -> None:
        recording, known = self._session.recording, self._known(state)
        if recording is not None and known is not None:
            self._reductions.end_compute(recording, known)

    def _end_backward(self, state: Any) -> None:
        recording, known = self._session.recording, self._known(state)
        if recording is not None and known is not None:
            self._reductions.end_backward(recording, known)

    def _known(self, state: Any) -> Reduced | None:
        return self._reductions.get(state._state_ctx)


def _synced(state: Any) -> bool:
    """Whether the backward reduces gradients; ``set_requires_gradient_sync`` has a say in that."""
    groups = [group for one in state._state_ctx.all_states for group in one._fsdp_param_groups]
    return any(group.reduce_grads for group in groups)


def _preceded(
    is_root: Callable[[Any], bool], observe: Callable[[Any], None], original: Callable[..., Any]
) -> Callable[..., Any]:
    """The model's parts know each other only after the first call, so this looks after it; it gathers nothing."""

    @functools.wraps(original)
    def _root_pre_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        root = is_root(self)
        result = original(self, *args, **kwargs)
        if root:
            observe(self)
        return result

    return _root_pre_forward


def _followed(observe: Callable[[Any], None], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _register_pre_backward_hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if torch.is_grad_enabled():
            observe(self)
        return result

    return _register_pre_backward_hook


def _announced(observe: Callable[[Any], None], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _pre_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        observe(self)
        return original(self, *args, **kwargs)

    return _pre_backward


def _surrounded(
    before: Callable[[Any], None], after: Callable[[Any], None], original: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def _root_post_backward_final_callback(self: Any) -> None:
        before(self)
        original(self)
        after(self)

    return _root_post_backward_final_callback
