"""FSDP2: models under ``fully_shard``, followed through the forward of their root and the backward.

The hooks that ``fully_shard`` puts on modules are bound when it is called, which may have been before this is in place.
What is wrapped here are methods that those hooks look up each time.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from .late import LateTap
from .patching import observed
from .reductions import Reduced

__all__ = ["ShardedModels"]

_GROUP: Final = ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup")
"""Module and name of the class of parameters that are gathered and reduced together."""


class ShardedModels(LateTap):
    """The models of this process that FSDP2 shards."""

    place = ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState")

    _reducing: Sequence[Any] = ()

    def _watch(self, watched: Any) -> None:
        guard = self._session.guard
        replace = self._patches.replace
        replace(watched, "_root_pre_forward", functools.partial(_preceded, self._is_root, guard(self._begin_forward)))
        around = {
            "_register_pre_backward_hook": (None, guard(self._end_forward)),
            "_pre_backward": (guard(self._begin_backward), None),
            "_root_post_backward_final_callback": (guard(self._end_compute), guard(self._end_backward)),
        }
        for name, (before, after) in around.items():
            replace(watched, name, functools.partial(observed, before=before, after=after))
        group = getattr(sys.modules.get(_GROUP[0]), _GROUP[1], None)
        if group is not None:
            replace(group, "post_backward", functools.partial(observed, before=guard(self._begin_reduction)))

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
                named=state._modules[0].named_parameters(),
                holding=lambda _size_bytes: self._reducing,
            )
        recording.steps.begin_forward(known.state, synced=_synced(state))

    def _end_forward(self, state: Any) -> None:
        if not torch.is_grad_enabled():
            return
        recording, known = self._session.recording, self._known(state)
        if recording is not None and known is not None and state._state_ctx.iter_forward_root is state:
            recording.steps.end_forward(known.state, synced=_synced(state))

    def _begin_backward(self, state: Any) -> None:
        known = self._known(state)
        if known is not None:
            self._reductions.begin_backward(known)

    def _begin_reduction(self, group: Any) -> None:
        """The gradients of a group of parameters are ready; if they are to be reduced, this is what they belong to."""
        if self._session.recording is None:
            return
        gathered = [one for one in group.fsdp_params if hasattr(one, "_unsharded_param")]
        self._reducing = [
            one.sharded_param
            for one in gathered
            if one.unsharded_accumulated_grad is not None or one.unsharded_param.grad is not None
        ]

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
